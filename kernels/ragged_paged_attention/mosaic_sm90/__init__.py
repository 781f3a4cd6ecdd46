"""Attention on Hopper (compute capability 9.0) in Pallas Mosaic GPU. `planner` is the way in."""
