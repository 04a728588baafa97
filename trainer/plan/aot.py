"""Ahead-of-time compilation for GPUs that this machine lacks, with XLA's memory report.

JAX compiles for a described topology (`jax.experimental.topologies`) with the packages
of the extra `plan`: XLA's compiler for CUDA and NVIDIA's assembler. It needs no driver,
no CUDA libraries and no device.
"""

import contextlib
import importlib.metadata
import math
import re
import shlex
import tempfile
import unittest.mock
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from trainer.compiled.hlo import Program
from trainer.compiled.instructions import Shape
from trainer.compiled.memory import held_bytes
from trainer.errors import UserError
from trainer.parallel.mesh import make_mesh
from trainer.plan.targets import CUDNN_VERSION, Target
from trainer.text import how_to_install

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-nvvm", "nvidia-cuda-nvcc")
# Autotuning measures kernels on a device. Nothing reads the machine code, so it is
# neither optimized nor assembled.
OPTIONS: dict[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_backend_optimization_level": 0,
}
# Stub assembler: the real one takes a third of the compile time. XLA only needs a
# non-empty file and the assembler's version.
ASSEMBLER = """#!/bin/sh
case $1 in --version) exec {ptxas} --version ;; esac
while [ $# -gt 0 ]; do
  case $1 in -o) echo none > "$2" ;; esac
  shift
done
"""


class Buffer(NamedTuple):
    """A temporary array that is live when memory use peaks.

    Attributes:
      name: the HLO instruction that makes it, with its index in that instruction's
          result.
      shape: without an element type for a table of pointers.
      bytes: its size.
    """

    name: str
    shape: Shape
    bytes: int


class Compiled(NamedTuple):
    """A program that was compiled for devices that this machine lacks.

    Attributes:
      program: its instructions.
      peak: bytes per device: arguments, results that do not alias them, temporaries.
      arguments: bytes of its arguments.
      buffers: the temporaries that are live when their total size peaks, the largest
          first.
    """

    program: Program
    peak: int
    arguments: int
    buffers: list[Buffer]


def check_packages() -> None:
    """Raise UserError where a package of the extra `plan` is missing or unfit."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"compiling for a GPU without one needs {package}, which is not"
                f" installed; {how_to_install('plan')} (needs no GPU), or: pip install"
                f" {' '.join(PACKAGES)}"
            ) from None
    # Only JAX's own packages are released with its version. A plugin of another one may
    # not load, or compile otherwise.
    for package in PACKAGES[:2]:
        if versions[package] != jax.__version__:
            raise UserError(
                f"{package} {versions[package]} does not fit jax {jax.__version__}; pip"
                f" install {package}=={jax.__version__}"
            )


def make_target_mesh(target: Target, gpus: int, hosts: int, *sizes: int) -> Mesh:
    """Return a mesh over GPUs that are only described, evenly on `hosts` hosts.

    `sizes` are those of `make_mesh`; without them all GPUs are on the axis `data`.
    """
    check_packages()
    described = topologies.get_topology_desc(
        platform="cuda",
        target_config=target.text_proto,
        topology=f"1x{hosts}x{gpus // hosts}",
    )
    return make_mesh(*(sizes or (-1,)), devices=described.devices)


def lower_for_target(lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Lowered:
    """Call `lower` for described devices.

    Before JAX writes a call of cuDNN's fused attention into a program, it asks the
    installed cuDNN for its version. None may be installed, so the version of the
    target's description is returned.
    """
    version_check = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    # unittest.mock refuses a name that the module lacks: a JAX that renames this
    # private function fails here, in words.
    with unittest.mock.patch(version_check, return_value=CUDNN_VERSION):
        return lower()


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Keep programs out of JAX's persistent cache, for all threads of the process.

    The cache cannot read such a program without its devices.
    """
    # No compilation takes so long, so nothing is written.
    name = "jax_persistent_cache_min_compile_time_secs"
    saved = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, saved)


def compile_for_target(
    lowered: jax.stages.Lowered, options: Mapping[str, Any]
) -> Compiled:
    """Compile with these options and `OPTIONS`, and read XLA's dumps.

    Only one thread per program may call it at a time.
    """
    with tempfile.TemporaryDirectory(prefix="plan-") as directory:
        dumps = Path(directory)
        compiled = lowered.compile(
            compiler_options={
                **OPTIONS,
                **options,
                # Of a compilation without devices only the dumps have the addresses and
                # live ranges of buffers: `memory_analysis` has an empty proto.
                "xla_dump_to": directory,
                "xla_gpu_cuda_data_dir": str(make_cuda_stub(dumps / "cuda")),
                "xla_dump_hlo_as_text": True,
            }
        )
        buffers = live_at_peak(
            read_dump(dumps, "buffer-assignment"), read_dump(dumps, "live-range")
        )
    memory = compiled.memory_analysis()
    assert memory is not None
    text = compiled.as_text()
    assert text is not None
    return Compiled(
        Program(text),
        held_bytes(memory) + memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        buffers,
    )


def make_cuda_stub(directory: Path) -> Path:
    """Make a CUDA directory for XLA, with CUDA's device functions and `ASSEMBLER`."""
    package = importlib.metadata.distribution("nvidia-cuda-nvcc")
    cuda = Path(str(package.locate_file("nvidia/cu13")))
    (directory / "bin").mkdir(parents=True)
    # XLA links CUDA's device functions, such as those of special functions, before it
    # calls the assembler.
    (directory / "nvvm").symlink_to(cuda / "nvvm")
    assembler = directory / "bin" / "ptxas"
    ptxas = shlex.quote(str(cuda / "bin" / "ptxas"))
    assembler.write_text(ASSEMBLER.format(ptxas=ptxas))
    assembler.chmod(0o755)
    return directory


def read_dump(directory: Path, name: str) -> str:
    """Return the text of XLA's dump of this name."""
    files = list(directory.glob(f"*gpu_after_optimizations-{name}.txt"))
    # More than one file means two programs in one directory, as by two threads.
    assert len(files) == 1, f"XLA wrote {len(files)} files {name}"
    return files[0].read_text()


BUFFER = re.compile(
    r" value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\):"
    r" (\w*)\[?([\d,]*)"
)
LIVE_RANGE = re.compile(r"^\s+(\S+\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)


def live_at_peak(assignment: str, live_ranges: str) -> list[Buffer]:
    """Return the temporaries that are live when their total size peaks, largest first.

    XLA's own list of live values at the peak is incomplete (jax 0.11.2: 5.1 of 7.2
    GiB). Values at the same address and time count once: an instruction may write its
    result over its operand.

    Args:
      assignment: XLA's dump of the buffer assignment.
      live_ranges: XLA's dump of the live ranges.
    """
    # By name, the address (allocation and offset) and the buffer.
    buffers: dict[str, tuple[tuple[int, int], Buffer]] = {}
    allocation = 0
    is_temporary = False
    for line in assignment.splitlines():
        if line.startswith("allocation"):
            allocation += 1
            # Arguments and results have allocations of their own. `memory_of` takes
            # arguments from the program; results that alias none are in its `gaps`.
            is_temporary = line.endswith("preallocated-temp:")
            continue
        match = BUFFER.match(line) if is_temporary else None
        if match is not None:
            name, size, offset, dtype, dims = match.groups()
            shape = Shape(dtype, tuple(map(int, dims.split(","))) if dims else ())
            buffer = Buffer(name, shape, int(size))
            # The live ranges write the index of each value in its instruction, `{}` for
            # the whole.
            key = name if name.endswith("}") else name + "{}"
            buffers[key] = ((allocation, int(offset)), buffer)
    starts_and_ends: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for name, first, last in LIVE_RANGE.findall(live_ranges):
        if name in buffers:
            starts_and_ends[int(first)].append((1, name))
            # A value is live up to and with its last time.
            starts_and_ends[int(last) + 1].append((-1, name))
    live: dict[tuple[tuple[int, int], int], list[Buffer]] = defaultdict(list)
    total = 0
    peak = -1
    at_peak: list[Buffer] = []
    for time in sorted(starts_and_ends):
        for change, name in sorted(starts_and_ends[time]):  # ends come before starts
            address, buffer = buffers[name]
            same_address = live[address, buffer.bytes]
            was_live = bool(same_address)
            if change > 0:
                same_address.append(buffer)
            else:
                same_address.remove(buffer)
            total += buffer.bytes * (bool(same_address) - was_live)
        if total > peak:
            peak = total
            at_peak = [values[0] for values in live.values() if values]
    return sorted(at_peak, key=lambda buffer: -buffer.bytes)
