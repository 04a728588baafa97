"""The least time of a program on a target: each kernel at its peak rate or at the memory's, one after another."""

from collections import defaultdict
from typing import Any

import jax.numpy as jnp

from trainer.compiled.hlo import Kernel, Program
from trainer.observe.peaks import peak_flops
from trainer.plan.targets import Target


def seconds_of_gemm(flops: float, dtype: str, target: Target) -> float:
    """At the peak rate of the operands' width; where FP8 has none, at that of 16 bits."""
    width: Any = {"fp8": jnp.float8_e4m3fn, "fp32": jnp.float32}.get(dtype, jnp.bfloat16)
    rate = peak_flops(target.device, width) or peak_flops(target.device, jnp.bfloat16)
    assert rate is not None, f"no peak rate of {target.device}"
    return flops / rate


def seconds_of_kernels(program: Program, target: Target) -> list[tuple[Kernel, float]]:
    """Each kernel with the seconds of all its runs, bound by its FLOPs or by its bytes, whichever takes longer.

    Of a causal attention half the positions count: its kernel skips the masked ones.
    """
    busy: dict[str, float] = defaultdict(float)
    for gemm in program.gemms:
        busy[gemm.name] += seconds_of_gemm(gemm.flops / gemm.times, gemm.dtype, target)
    for call in program.attentions:
        busy[call.name] += seconds_of_gemm(call.flops / call.times, call.dtype, target) / (2 if call.causal else 1)
    kernels = (kernel for kernel in program.kernels if kernel.kind != "collective")
    return [(k, k.times * max(busy[k.name], k.bytes / target.bandwidth)) for k in kernels]


def roofline_of_kernels(program: Program, target: Target) -> float:
    """Seconds of all kernels, one after another."""
    return sum(seconds for _, seconds in seconds_of_kernels(program, target))
