"""Eight CPU devices for every test; shapes that broadcast by rank are errors."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A run would else keep what it compiles in a folder of the user's.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")
# The tests' time is compilation; what is compiled is tiny.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", "")

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
