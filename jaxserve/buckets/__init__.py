"""The fixed shapes that steps run in."""
