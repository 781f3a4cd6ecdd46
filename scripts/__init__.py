"""Command-line entry points, run from the checkout as `python -m scripts.<name>`; each lists its flags with --help."""
