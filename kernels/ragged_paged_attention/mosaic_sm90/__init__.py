"""Attention on Hopper (compute capability 9.0) in Pallas Mosaic GPU. `attend` is the way in."""
