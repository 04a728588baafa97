"""Keep the memory that XLA frees on CPU in the process.

Every execution of a compiled program allocates its temporary buffer anew. glibc returns
blocks of that size to the operating system at once. Each training step would then fault
in all its memory again, and have it zeroed, 4 KiB at a time: a quarter of the step's
time.
"""

import ctypes
import platform

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next allocation.

    Call it before jax starts. It does nothing for other C libraries.
    """
    # Other C libraries may lack `mallopt`.
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    # One arena: glibc's other arenas cannot hold large blocks, and would map them.
    libc.mallopt(M_ARENA_MAX, 1)
    # A large block with a mapping of its own is unmapped when it is freed.
    libc.mallopt(M_MMAP_MAX, 0)
    # -1: the top of the heap is never given back.
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    # The heap grows by this much more than is needed: fewer calls of the system.
    libc.mallopt(M_TOP_PAD, 64 * 2**20)
