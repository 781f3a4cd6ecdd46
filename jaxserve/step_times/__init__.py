"""How long a step takes: fitted to measurements of a machine, or computed from datasheets."""
