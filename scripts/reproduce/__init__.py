"""The parts of the reproductions."""
