"""What benchmarks of parts share."""
