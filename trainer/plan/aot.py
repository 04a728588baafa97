"""Compiling for GPUs that are not there: their devices, and what the compiler says of a
program's memory.

JAX compiles ahead of time for a described topology (`jax.experimental.topologies`) with
the packages of the extra `plan`: XLA's compiler for CUDA and NVIDIA's assembler. No
driver, no CUDA libraries, no device.
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
from trainer.errors import UserError
from trainer.parallel.mesh import make_mesh
from trainer.plan.targets import CUDNN_VERSION, Target

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-nvvm", "nvidia-cuda-nvcc")
# Autotuning measures kernels on a device. Of the machine code nothing is read: it is
# not optimized, and not assembled.
OPTIONS: dict[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_backend_optimization_level": 0,
}
# In place of NVIDIA's assembler, which takes a third of the time: a file with something
# in it, and its version.
ASSEMBLER = """#!/bin/sh
case $1 in --version) exec {ptxas} --version ;; esac
while [ $# -gt 0 ]; do
  case $1 in -o) echo none > "$2" ;; esac
  shift
done
"""


class Buffer(NamedTuple):
    """A temporary array that is held at the moment of the largest need.

    Attributes:
      name: of the instruction that makes it, as in the HLO text, with its place in that
          instruction's result.
      shape: without an element type where it is a table of pointers.
      bytes: its size.
    """

    name: str
    shape: Shape
    bytes: int


class Compiled(NamedTuple):
    """A program compiled for devices that are not there.

    Attributes:
      program: its instructions.
      peak: bytes of a device that it takes: arguments, results that are not written in
          their place, temporaries.
      arguments: bytes of its arguments.
      buffers: the temporaries that are held when the sum of their sizes is largest, the
          largest first.
    """

    program: Program
    peak: int
    arguments: int
    buffers: list[Buffer]


def check_packages() -> None:
    """UserError names what of the extra `plan` is missing, or is not of JAX's
    version.
    """
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"compiling for a GPU without one needs {package}, which is not"
                " installed; pip install '.[plan]' (needs no GPU), or: pip install"
                f" {' '.join(PACKAGES)}"
            ) from None
    for package in PACKAGES[:2]:
        if versions[package] != jax.__version__:
            raise UserError(
                f"{package} {versions[package]} does not fit jax {jax.__version__}; pip"
                f" install {package}=={jax.__version__}"
            )


def make_target_mesh(target: Target, gpus: int, hosts: int, *sizes: int) -> Mesh:
    """A mesh over GPUs that are only described, evenly on `hosts` hosts; of
    `parallel.Sizes`, none: all is `data`.
    """
    check_packages()
    described = topologies.get_topology_desc(
        platform="cuda",
        target_config=target.text_proto,
        topology=f"1x{hosts}x{gpus // hosts}",
    )
    return make_mesh(*(sizes or (-1,)), devices=described.devices)


def lower_for_target(lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Lowered:
    """What `lower` makes, for described devices.

    JAX asks the installed cuDNN for its version before it writes a call of its fused
    attention into a program, and there need not be one installed: here the target's
    description answers.
    """
    asked = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    with unittest.mock.patch(asked, return_value=CUDNN_VERSION):
        return lower()


@contextlib.contextmanager
def written_to_no_cache() -> Iterator[None]:
    """What is compiled meanwhile is not written to JAX's persistent cache, which cannot
    read it without its devices.

    For all threads of the process.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def compile_for_target(
    lowered: jax.stages.Lowered, options: Mapping[str, Any]
) -> Compiled:
    """Compile with these options and `OPTIONS`, and read what the compiler says.

    One thread per program may do so at a time.
    """
    with tempfile.TemporaryDirectory(prefix="plan-") as directory:
        places = {
            "xla_dump_to": directory,
            "xla_gpu_cuda_data_dir": str(without_assembler(Path(directory) / "cuda")),
        }
        compiled = lowered.compile(
            compiler_options={
                **OPTIONS,
                **options,
                **places,
                "xla_dump_hlo_as_text": True,
            }
        )
        buffers = held_at_peak(
            *(
                dumped(Path(directory), name)
                for name in ("buffer-assignment", "live-range")
            )
        )
    memory = compiled.memory_analysis()
    assert memory is not None
    held = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    text = compiled.as_text()
    assert text is not None
    return Compiled(
        Program(text),
        held + memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        buffers,
    )


def without_assembler(directory: Path) -> Path:
    """A directory that is CUDA's to XLA, with its library of functions and
    `ASSEMBLER`.
    """
    cuda = Path(
        str(
            importlib.metadata.distribution("nvidia-cuda-nvcc").locate_file(
                "nvidia/cu13"
            )
        )
    )
    (directory / "bin").mkdir(parents=True)
    (directory / "nvvm").symlink_to(cuda / "nvvm")
    assembler = directory / "bin" / "ptxas"
    assembler.write_text(
        ASSEMBLER.format(ptxas=shlex.quote(str(cuda / "bin" / "ptxas")))
    )
    assembler.chmod(0o755)
    return directory


def dumped(directory: Path, name: str) -> str:
    """The text of XLA's dump of this name."""
    files = list(directory.glob(f"*gpu_after_optimizations-{name}.txt"))
    assert len(files) == 1, f"XLA wrote {len(files)} files {name}"
    return files[0].read_text()


def held_at_peak(assignment: str, live_ranges: str) -> list[Buffer]:
    """The temporaries that are held when they are most, the largest first, of XLA's
    places and live ranges of them.

    Its own list of what is live at the peak leaves values out (jax 0.11.2: 5.1 of 7.2
    GiB). Values in the same place at the same time are one: what an instruction makes
    of its operand in place.
    """
    places: dict[str, tuple[tuple[int, int], Buffer]] = {}
    arena, is_temporary = 0, False
    for line in assignment.splitlines():
        if line.startswith("allocation"):
            arena, is_temporary = arena + 1, line.endswith("preallocated-temp:")
        elif is_temporary and (
            found := re.match(
                r" value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\):"
                r" (\w*)\[?([\d,]*)",
                line,
            )
        ):
            name, size, offset, dtype, dims = found.groups()
            shape = (
                Shape(dtype, tuple(map(int, dims.split(","))))
                if dims
                else Shape(dtype, ())
            )
            places[name if name.endswith("}") else name + "{}"] = (
                (arena, int(offset)),
                Buffer(name, shape, int(size)),
            )
    changes: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for name, first, last in re.findall(
        r"^\s+(\S+\{[\d,]*\}):(\d+)-(\d+)$", live_ranges, re.MULTILINE
    ):
        if name in places:
            changes[int(first)].append((1, name))
            changes[int(last) + 1].append((-1, name))
    held: dict[tuple[tuple[int, int], int], list[Buffer]] = defaultdict(list)
    total, most, found_at_most = 0, -1, list[Buffer]()
    for moment in sorted(changes):
        for change, name in sorted(changes[moment]):  # first what ends
            place, buffer = places[name]
            there = held[place, buffer.bytes]
            before = bool(there)
            (there.append if change > 0 else there.remove)(buffer)
            # of several in one place one counts
            total += buffer.bytes * (bool(there) - before)
        if total > most:
            most, found_at_most = total, [there[0] for there in held.values() if there]
    return sorted(found_at_most, key=lambda buffer: -buffer.bytes)
