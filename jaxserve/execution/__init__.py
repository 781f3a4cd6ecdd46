"""The step on the device: its programs, their compilation, the device-resident state, and what runs them."""
