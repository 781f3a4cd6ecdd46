"""One address in front of several servers."""
