"""Eight CPU devices for every test; shapes that broadcast by rank are errors."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A run would else keep what it compiles in a folder of the user's.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")
# The tests' time is compilation; what is compiled is tiny.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
from tiny.runs import Runs  # noqa: E402

import xrpo_jax.tasks  # noqa: E402
from xrpo_jax import compile_cache  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def compiled_functions_are_kept_as_before():
    """A run says for its whole process where what XLA compiles is kept, and how much of it."""
    names = [name.lower() for name in (compile_cache.FOLDER, *compile_cache.LEAST)]
    before = {name: getattr(jax.config, name) for name in names}
    yield
    if any(getattr(jax.config, name) != value for name, value in before.items()):
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture
def letters_task():
    """Offers tests/tiny/tasks as tasks, which the tiny tokenizer can read."""
    path, folder = xrpo_jax.tasks.__path__, str(pathlib.Path(__file__).parent / "tiny" / "tasks")
    path.append(folder)
    yield
    path.remove(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Whole runs in processes of their own (tiny/runs.py)."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    yield made
    made.server.communicate()
