import subprocess
import sys

# A thread of its own, as XLA's: threads use other arenas than the main one.
FAULTS = """
import ctypes, resource, sys, threading
if sys.argv[1] == "keep":
    from trainer.run.allocator import keep_freed_memory
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def touch():
    block = libc.malloc(64 * 2**20)
    libc.memset(block, 1, 64 * 2**20)
    libc.free(block)

def faulted_mib():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 2**20

print([faulted_mib() for _ in range(3)][-1])
"""


def faulted_mib(mode):
    command = [sys.executable, "-c", FAULTS, mode]
    return float(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )


def test_memory_once_touched_is_not_faulted_in_again():
    assert faulted_mib("default") > 60
    assert faulted_mib("keep") < 1
