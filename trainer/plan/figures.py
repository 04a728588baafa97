"""Figures of a compiled program on a target: kernels, bytes, FLOPs and times."""

from collections import defaultdict
from typing import Any, NamedTuple

import jax.numpy as jnp

from trainer.compiled.hlo import Kernel, Program
from trainer.compiled.operations import Collective, FusedAttention
from trainer.observe.peaks import peak_flops
from trainer.plan.aot import Compiled
from trainer.plan.budget import memory_of
from trainer.plan.targets import Target

# Figures by group and key, such as ("kernels", "reduce").
Figures = dict[tuple[str, ...], float]


class Hardware(NamedTuple):
    """The hardware that a step is compiled for.

    Attributes:
      target: the kind of GPU.
      gpus: number of GPUs, evenly on `hosts` hosts.
      hosts: number of hosts.
      memory_fraction: the share of a device's memory that JAX lets a program have.
    """

    target: Target
    gpus: int
    hosts: int
    memory_fraction: float

    @property
    def usable(self) -> int:
        """Bytes of a device that a program can use."""
        return int(self.target.memory * self.memory_fraction)

    def verdict(self, peak: float) -> str:
        """Say whether so many bytes fit into the memory that a program can use."""
        if peak <= self.usable:
            return "fits"
        return "DOES NOT FIT"

    @property
    def link(self) -> float:
        """Bytes per second and direction between devices.

        Between hosts, the GPUs of a host share its network.
        """
        if self.hosts == 1:
            return self.target.link_bandwidth
        network = self.target.network * self.gpus / self.hosts
        return min(self.target.link_bandwidth, network)


WIDTHS: dict[str, Any] = {
    "fp4": jnp.float4_e2m1fn,
    "fp8": jnp.float8_e4m3fn,
    "fp32": jnp.float32,
}


def gemm_seconds(flops: float, dtype: str, target: Target) -> float:
    """Return the time at the peak rate of a dtype; 16-bit's where FP8 has none."""
    # FP16 has the rate of BF16.
    width = WIDTHS.get(dtype, jnp.bfloat16)
    # For a GPU without tensor cores of the width XLA multiplies widened operands.
    rate = peak_flops(target.device, width) or peak_flops(target.device, jnp.bfloat16)
    assert rate is not None, f"no peak rate of {target.device}"
    return flops / rate


def attention_seconds(call: FusedAttention, target: Target) -> float:
    """Return the time of one attention call at the peak rate.

    A causal one takes half: its kernel skips the masked positions.
    """
    seconds = gemm_seconds(call.flops / call.times, call.dtype, target)
    if call.causal:
        return seconds / 2
    return seconds


def kernel_rooflines(program: Program, target: Target) -> list[tuple[Kernel, float]]:
    """Return each kernel with the seconds of all its runs, without collectives.

    A kernel is bound by its FLOPs or by its bytes, whichever takes longer.
    """
    busy: dict[str, float] = defaultdict(float)
    for gemm in program.gemms:
        # A kernel may hold several products.
        busy[gemm.name] += gemm_seconds(gemm.flops / gemm.times, gemm.dtype, target)
    for call in program.attentions:
        busy[call.name] += attention_seconds(call, target)
    kernels = (kernel for kernel in program.kernels if kernel.kind != "collective")
    return [
        (k, k.times * max(busy[k.name], k.bytes / target.bandwidth)) for k in kernels
    ]


def collective_seconds(collective: Collective, hardware: Hardware) -> float:
    """Return the time of all runs of a collective, on a ring."""
    return collective.sent(hardware.gpus) / hardware.link


def figures_of(
    compiled: Compiled, hardware: Hardware, tokens: int, padded_vocab: int
) -> Figures:
    """Return the figures that are linear in the number of layers."""
    program = compiled.program
    out: Figures = defaultdict(float)
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
        out["sent", collective.op, collective.dtype] += collective.sent(hardware.gpus)
        out["seconds", "collectives"] += collective_seconds(collective, hardware)
    out["seconds", "kernels"] = sum(
        seconds for _, seconds in kernel_rooflines(program, hardware.target)
    )
    # No defaultdict: a misspelt name is an error to who reads it.
    return dict(out)


def extrapolate(
    near: Figures, far: Figures, depths: tuple[int, int], depth: int
) -> Figures:
    """Return figures at `depth` layers from those at two depths, linearly."""
    factor = (depth - depths[0]) / (depths[1] - depths[0])
    # A kind of kernel may be missing at one of the depths: it counts 0 there.
    names = dict.fromkeys([*near, *far])
    return {
        name: near.get(name, 0) + (far.get(name, 0) - near.get(name, 0)) * factor
        for name in names
    }
