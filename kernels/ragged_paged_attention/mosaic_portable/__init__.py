"""Ragged paged attention for every NVIDIA GPU from compute capability 8.0 on (see attend)."""
