"""Figures of a compiled program on a described target: kernels, bytes, FLOPs,
collectives, and how long they take.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import jax.numpy as jnp

from trainer.compiled.hlo import Kernel, Program
from trainer.compiled.operations import Collective
from trainer.observe.peaks import peak_flops
from trainer.plan.aot import Compiled
from trainer.plan.budget import memory_of
from trainer.plan.targets import Target

# by group and key, such as ("kernels", "reduce")
Figures = dict[tuple[str, ...], float]


class Aim(NamedTuple):
    """What a step is compiled for.

    Attributes:
      target: the kind of GPU.
      gpus: how many, evenly on `hosts` hosts.
      memory_fraction: the share of a device's memory that JAX lets a program have.
    """

    target: Target
    gpus: int
    hosts: int
    memory_fraction: float

    @property
    def usable(self) -> int:
        """Bytes of a device that a program can have."""
        return int(self.target.memory * self.memory_fraction)

    @property
    def link(self) -> float:
        """Bytes per second and direction between devices: between hosts, those of a
        host use its network together.
        """
        between = self.target.network * self.gpus / self.hosts
        return (
            self.target.link_bandwidth
            if self.hosts == 1
            else min(self.target.link_bandwidth, between)
        )


def seconds_of_gemm(flops: float, dtype: str, target: Target) -> float:
    """At the peak rate of the operands' width; where FP8 has none, at that of 16
    bits.
    """
    width: Any = {"fp8": jnp.float8_e4m3fn, "fp32": jnp.float32}.get(
        dtype, jnp.bfloat16
    )
    rate = peak_flops(target.device, width) or peak_flops(target.device, jnp.bfloat16)
    assert rate is not None, f"no peak rate of {target.device}"
    return flops / rate


def seconds_of_kernels(program: Program, target: Target) -> list[tuple[Kernel, float]]:
    """Each kernel with the seconds of all its runs, bound by its FLOPs or by its bytes,
    whichever takes longer.

    Of a causal attention half the positions count: its kernel skips the masked ones.
    """
    busy: dict[str, float] = defaultdict(float)
    for gemm in program.gemms:
        busy[gemm.name] += seconds_of_gemm(gemm.flops / gemm.times, gemm.dtype, target)
    for call in program.attentions:
        busy[call.name] += seconds_of_gemm(
            call.flops / call.times, call.dtype, target
        ) / (2 if call.causal else 1)
    kernels = (kernel for kernel in program.kernels if kernel.kind != "collective")
    return [
        (k, k.times * max(busy[k.name], k.bytes / target.bandwidth)) for k in kernels
    ]


def roofline_of_kernels(program: Program, target: Target) -> float:
    """Seconds of all kernels, one after another."""
    return sum(seconds for _, seconds in seconds_of_kernels(program, target))


def seconds_of_collective(collective: Collective, aim: Aim) -> float:
    """All its runs, on a ring."""
    return collective.sent(aim.gpus) / aim.link


def figures_of(compiled: Compiled, aim: Aim, tokens: int, padded_vocab: int) -> Figures:
    """What is linear in the layers, by name."""
    program, out = compiled.program, defaultdict[tuple[str, ...], float](float)
    for kind, size in memory_of(compiled, tokens, padded_vocab).items():
        out["memory", kind] = size
    for gemm in program.gemms:
        out["gemms", gemm.dtype] += gemm.times
        out["flops", gemm.dtype] += gemm.flops
        out["gemm kernels", f"{gemm.dtype} {gemm.kernel}"] += gemm.times
    for call in program.attentions:
        out["attentions", call.dtype] += call.times
        out["attention flops", call.dtype] += call.flops
    for kernel in program.kernels:
        out["kernels", kernel.kind] += kernel.times
        out["bytes", kernel.kind] += kernel.times * kernel.bytes
    for collective in program.collectives:
        out["collectives", collective.op, collective.dtype] += (
            collective.times * collective.bytes
        )
        out["collective runs", collective.op, collective.dtype] += collective.times
        out["sent", collective.op, collective.dtype] += collective.sent(aim.gpus)
        out["seconds", "collectives"] += seconds_of_collective(collective, aim)
    out["seconds", "kernels"] = roofline_of_kernels(program, aim.target)
    return dict(out)


def continued(
    near: Figures, far: Figures, depths: tuple[int, int], depth: int
) -> Figures:
    """Figures at `depth` layers from those at two depths."""
    turns = (depth - depths[0]) / (depths[1] - depths[0])
    names = dict.fromkeys([*near, *far])
    return {
        name: near.get(name, 0) + (far.get(name, 0) - near.get(name, 0)) * turns
        for name in names
    }
