"""placeholder"""
BLOCK_ROWS = 64
def lacks(w): return "a kernel"
def matmul(x, w, groups): raise NotImplementedError
