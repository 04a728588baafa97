"""How long a step is predicted to take on a GPU: each kernel at the rates of its class,
which stand here alone.

A kernel takes the longest of three, and a fixed time: its FLOPs at a share of the peak
of its products, its bytes at a share of the memory's bandwidth, its arithmetic at a
share of the FP32 lanes. Between two kernels there is a gap. The classes are those of a
profile (`scripts.bench.profiling`), which has what is predicted beside what it
measured: there the rates are to be corrected.

Not in it: what the L2 cache saves where a kernel reads what the one before has written,
which is much at 124M; clocks that fall under load, but for what the shares of published
measurements have of it; kernels that run side by side.

References:
    [1] cuBLASLt on an H100 SXM, E4M3 8192 x 8192 x 8192: 1,600 to 1,630 TFLOP/s (0.81);
        by PyTorch's _scaled_mm 1,175 (0.59): measurements of 16 GPUs, published as
        `reports_cublaslt_fp8_crosscheck_20260524` (gitea.d-robotics.cc).
    [2] S. Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS: H100
        SXM, BF16, 794 TFLOP/s (0.80), quoted from memory.
    [3] FlashAttention-3 (arXiv 2407.08608), cuDNN on an H100 SXM, head dim 64, 1024
        tokens: forward 258 TFLOP/s causal; backward 348 without a mask, for a causal
        one nothing is published.
    [4] Copies and triads on an H100 SXM: 3.0 to 3.1 TB/s (0.92).
"""

import math
from collections import defaultdict
from typing import NamedTuple

from trainer.compiled.arithmetic import lane_clocks
from trainer.compiled.classes import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    ELEMENTWISE,
    FP8,
    GAPS,
    OTHER,
    PRODUCTS,
    PRODUCTS32,
    REDUCTIONS,
    TRANSPOSES,
    UPDATE,
    classes_of,
)
from trainer.compiled.hlo import Kernel, Program
from trainer.compiled.operations import Gemm
from trainer.plan.figures import Aim, Figures, seconds_of_collective, seconds_of_gemm
from trainer.plan.targets import Target


class Rate(NamedTuple):
    """What kernels of a class reach.

    Attributes:
      flops: share of the peak rate of products of their width.
      bytes: share of the memory's bandwidth.
      lanes: share of the FP32 lanes' clocks, the rest being addresses, loads and
          stores.
      fixed_us: microseconds that each takes beside its work: its start, its first
          loads, its end.
    """

    flops: float
    bytes: float
    lanes: float = 1.0
    fixed_us: float = 2.0


# Published: the memory's 0.92 [4], of which generated kernels have a little less, and
# the attention's forward 0.26 [3]. Assumed: products reach 0.9 of what is published for
# the best sizes [1, 2], between [1]'s two figures for FP8; the attention's backward
# pass as its forward one; a half of the memory's rate for transposes, whose elements of
# a byte are written in short pieces; 0.6 for what adds up columns; 0.5 of the lanes;
# all fixed times and the gap.
RATES = {
    FP8: Rate(0.70, 0.85, fixed_us=3.0),
    PRODUCTS: Rate(0.72, 0.85, fixed_us=3.0),
    PRODUCTS32: Rate(0.70, 0.85, fixed_us=3.0),
    ATTENTION: Rate(0.26, 0.85, fixed_us=5.0),
    TRANSPOSES: Rate(1.0, 0.50, 0.5),
    REDUCTIONS: Rate(1.0, 0.60, 0.5),
    ELEMENTWISE: Rate(1.0, 0.85, 0.5),
    UPDATE: Rate(1.0, 0.75, 0.5),
    COLLECTIVES: Rate(1.0, 1.0, fixed_us=10.0),
    COPIES: Rate(1.0, 0.90),
    OTHER: Rate(1.0, 0.50, 0.5),
}
GAP_US = 1.0  # between kernels of a CUDA graph; assumed
TILE = 128  # rows and columns of a product that a multiprocessor computes at a time
# elements of a sum at least, where cuBLASLt divides it among multiprocessors that have
# nothing to do
SPLIT = 2048


def fill(gemm: Gemm, target: Target) -> float:
    """The share of the multiprocessors that have a tile of a product, over all its
    rounds.

    A gradient of 768 x 768 has 36 tiles for 132 of them. Its sum is then divided, into
    parts of `SPLIT` at least.
    """
    batch, rows, columns, contracted = gemm.sizes
    tiles = batch * math.ceil(rows / TILE) * math.ceil(columns / TILE)
    parts = range(1, max(contracted // SPLIT, 1) + 1)
    return max(
        tiles * n / (math.ceil(tiles * n / target.cores) * target.cores) for n in parts
    )


def predicted_of_kernels(
    program: Program, target: Target
) -> list[tuple[Kernel, float]]:
    """Each kernel with the seconds of all its runs, without gaps; of a collective,
    without what it sends.
    """
    busy: dict[str, float] = defaultdict(float)
    for gemm in program.gemms:
        busy[gemm.name] += seconds_of_gemm(
            gemm.flops / gemm.times, gemm.dtype, target
        ) / fill(gemm, target)
    for call in program.attentions:
        busy[call.name] += seconds_of_gemm(
            call.flops / call.times, call.dtype, target
        ) / (2 if call.causal else 1)
    executed = {e.instruction.name: e for e in program.executed}
    classes, out = classes_of(program), list[tuple[Kernel, float]]()
    lanes = target.cores * target.lanes * target.clock_ghz * 1e9
    for kernel in program.kernels:
        rate, is_sent = RATES[classes[kernel.name]], classes[kernel.name] == COLLECTIVES
        moving = 0.0 if is_sent else kernel.bytes / target.bandwidth
        computing = (
            0.0 if is_sent else lane_clocks(program, executed[kernel.name]) / lanes
        )
        work = max(
            busy[kernel.name] / rate.flops, moving / rate.bytes, computing / rate.lanes
        )
        out.append((kernel, kernel.times * (work + 1e-6 * rate.fixed_us)))
    return out


def predicted(program: Program, aim: Aim) -> Figures:
    """What a step is predicted to take, by class, with the gaps between all kernels as
    a class of their own.

    Seconds under ("predicted", class), kernels under ("launches", class).
    """
    classes, out = classes_of(program), defaultdict[tuple[str, ...], float](float)
    for kernel, seconds in predicted_of_kernels(program, aim.target):
        out["launches", classes[kernel.name]] += kernel.times
        out["predicted", classes[kernel.name]] += seconds
    for collective in program.collectives:
        out["predicted", COLLECTIVES] += seconds_of_collective(collective, aim)
    out["launches", GAPS] = sum(kernel.times for kernel in program.kernels)
    out["predicted", GAPS] = 1e-6 * GAP_US * out["launches", GAPS]
    return dict(out)
