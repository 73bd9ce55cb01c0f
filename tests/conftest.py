"""Eight CPU devices for every test; shapes that broadcast by rank are errors."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A run would else keep what it compiles in a folder of the user's.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")
# The tests' time is compilation; what is compiled is tiny.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")

import jax  # noqa: E402
import pytest  # noqa: E402
from tiny.runs import Runs  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Whole runs in processes of their own (tiny/runs.py)."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    yield made
    made.server.communicate()
