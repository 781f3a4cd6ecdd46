"""How long a step takes: fitted to measurements of a machine, or computed from datasheets.

fitted: StepTimes, what everyone asks, and the model fitted to a measured machine. analytic: the same for GPUs that are not at hand,
made of hardware (datasheets), operators (formulas) and model_shapes (sizes of named models).
"""
