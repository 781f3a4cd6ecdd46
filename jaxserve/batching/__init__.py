"""A Schedule packed into one upload: the step's layout, its packer, and attention's work lists."""
