"""Training of heads that draft for a target: EAGLE-3 and Medusa, on the target's own answers."""
