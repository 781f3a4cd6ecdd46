"""What the kernels for CPUs share: the library that they are compiled into, its threads, and its vectors.

The C++ of each kernel lies beside its Pallas relatives, as `kernels/<kernel>/cpu.cc`. `library` is the way in.
"""
