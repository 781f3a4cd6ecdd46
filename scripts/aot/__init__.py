"""The parts of aot_check: compiling for a GPU that is not there."""
