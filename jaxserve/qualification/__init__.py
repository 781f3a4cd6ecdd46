"""A card that nobody has tried checks itself: which card this is, the process that tries the kernels, and what was found.

`qualify.qualify` is the way in. What is tried is kernels/qualification's; what follows for an engine is engine/kernel_choice.py's.
"""
