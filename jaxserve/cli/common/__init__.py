"""What several commands share: flags, models by name, timed runs, plots and tables."""
