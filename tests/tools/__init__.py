"""Tools that look at the project itself."""
