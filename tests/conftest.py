"""What every test shares."""

import os

# Before anything imports jax. JAX_PLATFORMS=cuda pytest tests/kernels runs the kernels on a GPU instead.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
