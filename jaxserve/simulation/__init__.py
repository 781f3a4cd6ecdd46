"""The engine without a device: how long its steps take (step_time), what it does with a workload in virtual time (replay)."""
