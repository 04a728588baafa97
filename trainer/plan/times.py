"""Predicted time of a step on a GPU: each kernel at the rates of its class.

A kernel takes a fixed time, and the longest of three: its FLOPs at a share of the peak
of its matmuls, its bytes at a share of the memory's bandwidth, its arithmetic at a
share of the FP32 lanes. Between two kernels there is a gap. The classes are those of a
profile (`scripts.bench profile=3`), which prints predictions and measurements:
correct the rates there.

The rates are those of an H100 SXM (jax 0.11.2, cuDNN 9.19, 2026-11-26), of profiles of
GPT-2 124M in bf16 and in the flagship, and of 774M in bf16, 8 sequences of 1024
(docs/measurements.md). Not measured, and as published or assumed: FP32 products,
collectives, copies, other kernels. The flagship of 774M was predicted by them at 95.1
ms before it was measured at 94.3; of 1558M both precisions took 3 to 4% longer.

Not modeled: hits in the L2 cache, where a kernel reads the output of the previous one,
which matter at 124M parameters; clocks that fall under load, except as far as the
measurements include them; kernels that run concurrently. A collective is hidden behind
the kernels between its start and its end, which it does not slow down.

References:
    [1] cuBLASLt on an H100 SXM, E4M3 8192 x 8192 x 8192: 1,600 to 1,630 TFLOP/s (0.81);
        by PyTorch's _scaled_mm 1,175 (0.59): measurements of 16 GPUs, published as
        `reports_cublaslt_fp8_crosscheck_20260524` (gitea.d-robotics.cc).
"""

import math
from collections import defaultdict
from collections.abc import Mapping
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
from trainer.plan.figures import (
    Figures,
    Hardware,
    attention_seconds,
    collective_seconds,
    gemm_seconds,
)
from trainer.plan.targets import Target


class Rate(NamedTuple):
    """The rates that kernels of a class reach.

    Attributes:
      flops: share of the peak rate of matmuls of their width.
      bytes: share of the memory's bandwidth.
      lanes: share of the FP32 lanes' clocks; addresses, loads and stores take the rest.
      fixed_us: microseconds of each launch besides its work: start, first loads, end.
    """

    flops: float
    bytes: float
    lanes: float = 1.0
    fixed_us: float = 1.5


RATES = {
    # profiles: 0.70 at 124M, 0.74 at 774M; [1] has 0.59 and 0.81
    FP8: Rate(0.70, 0.85, fixed_us=3.0),
    PRODUCTS: Rate(0.79, 0.85, fixed_us=3.0),
    PRODUCTS32: Rate(0.70, 0.85, fixed_us=3.0),
    # The forward pass; the backward pass has `BACKWARD_ATTENTION`.
    ATTENTION: Rate(0.30, 0.85, fixed_us=5.0),
    TRANSPOSES: Rate(1.0, 0.50, 0.5),
    REDUCTIONS: Rate(1.0, 0.68, 0.60),
    ELEMENTWISE: Rate(1.0, 0.94, 0.64),
    UPDATE: Rate(1.0, 0.86, 0.85),
    COLLECTIVES: Rate(1.0, 1.0, fixed_us=10.0),
    COPIES: Rate(1.0, 0.90),
    OTHER: Rate(1.0, 0.50, 0.5),
}
# Share of peak FLOPs of the deterministic attention backward (three kernels).
BACKWARD_ATTENTION = 0.19
# Share of the bandwidth of a kernel that writes an array and its transpose.
BOTH_ORDERS = 0.24
GAP_US = 0.9  # between kernels of a CUDA graph
TILE = 128  # rows and columns of a matmul that a multiprocessor computes at a time
# Minimum contracted elements of each part of a split-K matmul of cuBLASLt.
SPLIT = 2048


def fill(gemm: Gemm, target: Target) -> float:
    """Return the share of multiprocessors that have a tile of a matmul, over all waves.

    A gradient of 768 x 768 has 36 tiles for 132 multiprocessors. cuBLASLt then
    splits its contraction into parts of at least `SPLIT`.
    """
    batch, rows, columns, contracted = gemm.sizes
    tiles = batch * math.ceil(rows / TILE) * math.ceil(columns / TILE)
    fills = []
    # cuBLASLt chooses the split by heuristics that are not public: the best is assumed.
    for n in range(1, max(contracted // SPLIT, 1) + 1):
        waves = math.ceil(tiles * n / target.sm_count)
        fills.append(tiles * n / (waves * target.sm_count))
    return max(fills)


def kernel_predictions(program: Program, target: Target) -> list[tuple[Kernel, float]]:
    """Return each kernel with the seconds of all its runs, without gaps.

    Of a collective it is the time without the transfer.
    """
    busy: dict[str, float] = defaultdict(float)
    classes = classes_of(program)
    predictions = []
    for gemm in program.gemms:
        seconds = gemm_seconds(gemm.flops / gemm.times, gemm.dtype, target)
        busy[gemm.name] += (
            seconds / fill(gemm, target) / RATES[classes[gemm.name]].flops
        )
    for call in program.attentions:
        share = BACKWARD_ATTENTION if call.backward else RATES[ATTENTION].flops
        busy[call.name] += attention_seconds(call, target) / share
    executed = {e.instruction.name: e for e in program.executed}
    accumulating = {gemm.name for gemm in program.gemms if gemm.accumulates}
    fp32_units = target.sm_count * target.fp32_units_per_sm
    lane_rate = fp32_units * target.clock_ghz * 1e9
    for kernel in program.kernels:
        kernel_class = classes[kernel.name]
        work = busy[kernel.name]
        rate = RATES[kernel_class]
        # `predicted` adds a collective's transfer, as far as no kernel hides it.
        if kernel_class != COLLECTIVES:
            run = executed[kernel.name]
            writes_both = program.writes_both_orders(run)
            share = BOTH_ORDERS if writes_both else rate.bytes
            moved = kernel.bytes / target.bandwidth / share
            clocks = lane_clocks(program, run)
            if kernel.name in accumulating:
                work += moved  # its tiles are read and written after the matmul
            # The longest and not the sum: loads, arithmetic and products of a kernel
            # overlap.
            work = max(work, moved, clocks / lane_rate / rate.lanes)
        seconds = kernel.times * (work + 1e-6 * rate.fixed_us)
        predictions.append((kernel, seconds))
    return predictions


def predicted(program: Program, hardware: Hardware) -> Figures:
    """Return the predicted seconds and launches of a step, by class.

    Seconds are under ("predicted", class), kernels under ("launches", class), the
    transfers behind other kernels under ("hidden", "collectives"). The gaps between all
    kernels are one more class.
    """
    classes = classes_of(program)
    out: Figures = defaultdict(float)
    busy: dict[str, float] = {}
    for kernel, seconds in kernel_predictions(program, hardware.target):
        out["launches", classes[kernel.name]] += kernel.times
        out["predicted", classes[kernel.name]] += seconds
        # Collectives share the links, so one does not hide another.
        busy[kernel.name] = 0.0 if kernel.kind == "collective" else seconds
    transfers: dict[str, float] = defaultdict(float)
    for collective in program.collectives:
        transfers[collective.name] += collective_seconds(collective, hardware)
    if transfers:
        exposed = sum(exposed_seconds(program, transfers, busy).values())
        out["predicted", COLLECTIVES] += exposed
        out["hidden", COLLECTIVES] = sum(transfers.values()) - exposed
    out["launches", GAPS] = sum(kernel.times for kernel in program.kernels)
    out["predicted", GAPS] = 1e-6 * GAP_US * out["launches", GAPS]
    return dict(out)


def exposed_seconds(
    program: Program, transfers: Mapping[str, float], busy: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds of each collective's transfers in which no kernel runs.

    Kernels between its start and its end hide it; each hides one collective at a time,
    the first of the schedule.

    Args:
      program: in the order of its schedule.
      transfers: the seconds of all transfers, by the collective's name.
      busy: the seconds of all runs of other kernels, by name.
    """
    names = [e.instruction.name for e in program.executed]
    ends = {
        e.instruction.operands[0]: i
        for i, e in enumerate(program.executed)
        if e.instruction.opcode.endswith("-done")
    }
    # What a kernel has hidden of one collective is not there for the next.
    available = [busy.get(name, 0.0) for name in names]
    exposed = dict(transfers)
    for start, name in enumerate(names):
        if name not in exposed:
            continue
        # A synchronous collective has no end of its own, and nothing hides it.
        for i in range(start, ends.get(name, start)):
            hidden = min(exposed[name], available[i])
            exposed[name] -= hidden
            available[i] -= hidden
    return exposed
