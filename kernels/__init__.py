"""Accelerator kernels, one folder or file a kernel. Imports jax and numpy only; knows nothing of requests, models or weights."""
