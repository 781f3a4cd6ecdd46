"""The parts of gpu_check."""
