"""The plan of a configuration's compiled train step on a described target.

All figures are per device. The need of a deep model is linear in its layers, which are
all alike. So past `MAX_EXACT_LAYERS` unrolled layers the step is compiled at the two
`DEPTHS` and extrapolated, and the plan says so.

Legend: B sequences of a device's micro-batch, T tokens of each, N = B*T.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, NamedTuple

import jax.numpy as jnp

from trainer.compiled.fp8 import Gpu, Layer, not_fp8
from trainer.compiled.operations import NARROW_NAMES
from trainer.model import Model
from trainer.models.family import Spec
from trainer.observe.peaks import peak_flops
from trainer.observe.throughput import GIB, mfu
from trainer.plan.aot import (
    Compiled,
    compile_for_target,
    lower_for_target,
    no_compilation_cache,
)
from trainer.plan.figures import Figures, Hardware, extrapolate, figures_of
from trainer.plan.times import predicted
from trainer.precision.policy import Policy
from trainer.step.step import Tokens
from trainer.step.xla_flags import gpu_options
from trainer.text import plural
from trainer.workload import TrainTask, lower_step

MAX_EXACT_LAYERS = 12  # unrolled layers that are compiled without extrapolation
# A pattern whose second part has a digit, such as h.0.*, chooses layers by number.
BLOCK_NUMBER = re.compile(r"[^.]*\.[^.]*\d")
# With fewer layers the peak can be in the head or the optimizer. With a smaller
# difference the gaps of memory would be multiplied.
DEPTHS = (6, 12)
LOG_SECONDS = 60  # seconds between messages about a compilation
TRIES = 12  # measurements at most, in search of the largest micro-batch
MAX_SEARCHED = 4096  # the largest micro-batch of that search, in sequences
# Relative precision of the search with extrapolated figures, which are not exact.
SLACK = 0.05


@dataclasses.dataclass(frozen=True)
class CollectiveSum:
    """All collectives of a step with the same operation and dtype.

    Attributes:
      op: the HLO opcode, such as all-reduce.
      dtype: of the elements.
      bytes: of all results.
      sent_bytes_per_device: bytes that each device sends.
      count: number of runs.
    """

    op: str
    dtype: str
    bytes: int
    sent_bytes_per_device: int
    count: int


class Measured(NamedTuple):
    """The figures of a step, and its program.

    With extrapolated figures the program is that of the larger depth.
    """

    figures: Figures
    model: Model
    compiled: Compiled

    @property
    def peak(self) -> int:
        """Peak bytes per device."""
        return round(sum(self.group("memory").values()))

    @property
    def constant_bytes(self) -> float:
        """Bytes per device that do not depend on the batch."""
        memory = self.group("memory")
        kinds = ("weights", "optimizer", "FP8 weights", "gradients")
        return sum(memory[kind] for kind in kinds)

    @property
    def seconds(self) -> float:
        """Predicted seconds per step; see `trainer.plan.times`."""
        return sum(self.group("predicted").values())

    @property
    def kernels(self) -> int:
        """Number of kernels per step."""
        return round(sum(self.group("kernels").values()))

    @property
    def classes(self) -> dict[str, dict[str, float]]:
        """Predicted seconds and launches per step of each class of kernels."""
        launches = self.counts("launches")
        return {
            kernel_class: {"seconds": seconds, "launches": launches[kernel_class]}
            for kernel_class, seconds in self.group("predicted").items()
        }

    @property
    def collectives(self) -> list[CollectiveSum]:
        """The collectives of a step, by operation and dtype."""
        sums = []
        for (group, *key), size in self.figures.items():
            if group == "collectives":
                sent = round(self.figures["sent", *key])
                runs = round(self.figures["collective runs", *key])
                op, dtype = key
                sums.append(CollectiveSum(op, dtype, round(size), sent, runs))
        return sums

    def group(self, name: str) -> dict[str, float]:
        """Return the figures `(name, key)` by key."""
        return {key[1]: x for key, x in self.figures.items() if key[0] == name}

    def counts(self, name: str) -> dict[str, int]:
        """Return the figures `(name, key)` by key, rounded."""
        return {key: round(x) for key, x in self.group(name).items()}


Batches = Callable[[int], Tokens]  # from B to the step's batch


def is_extrapolated(
    spec: Spec, policy: Policy, exact: bool, trainable: tuple[str, ...] = ()
) -> bool:
    """Return whether a step is extrapolated from two depths.

    Patterns that choose layers by number have no counterpart at another depth.
    """
    # At another depth `h.11.*` is another block, or none.
    patterns = (
        *policy.fp8_modules,
        *policy.exclude,
        *(policy.backward_e4m3 or ()),
        *trainable,
    )
    if any(BLOCK_NUMBER.match(pattern) for pattern in patterns):
        return False
    # A scanned model has one block to compile at any depth.
    return not (exact or spec.scan_layers or spec.n_layer <= MAX_EXACT_LAYERS)


def measure(
    task: TrainTask,
    tokens: Tokens,
    hardware: Hardware,
    sequences: int,
    *,
    extrapolated: bool,
    pool: ThreadPoolExecutor,
    log: Callable[[str], None],
) -> Measured:
    """Compile a task's step, and return its figures.

    Args:
      task: the task.
      tokens: the step's batch.
      hardware: the GPUs and hosts.
      sequences: B.
      extrapolated: compile `DEPTHS` in place of all layers.
      pool: compiles one program per core. Tracing stays in the caller's thread, which
        `lower_for_target` needs.
      log: receives a message each minute.
    """
    spec, policy = task.model.spec, task.model.policy
    models = [task.model]
    if extrapolated:
        specs = [dataclasses.replace(spec, n_layer=n) for n in DEPTHS]
        models = [Model.make(shallow, policy) for shallow in specs]

    def submit(model: Model) -> Future[Compiled]:
        step = functools.partial(lower_step, task._replace(model=model), tokens)
        # The options of training: with others XLA chooses other kernels.
        options = gpu_options(policy, task.kernels)
        # Lowered here and not in the pool: `lower_for_target` patches JAX for all
        # threads.
        return pool.submit(compile_for_target, lower_for_target(step), options)

    # The deepest model takes longest, so it starts first.
    running = [submit(model) for model in reversed(models)][::-1]

    minutes = 0
    # A deep model compiles for minutes, in which nothing else is printed.
    while wait_for(running, LOG_SECONDS).not_done:
        minutes += 1
        log(f"  still compiling after {minutes} min")
    programs = [part.result() for part in running]
    figures = [
        figures_of(compiled, hardware, sequences * spec.context, spec.padded_vocab)
        | predicted(compiled.program, hardware)
        for compiled in programs
    ]
    total = figures[0]
    if extrapolated:
        total = extrapolate(figures[0], figures[1], DEPTHS, spec.n_layer)
    return Measured(total, models[-1], programs[-1])


class BatchSizeBounds(NamedTuple):
    """Bounds of the largest micro-batch that fits in memory.

    Attributes:
      fits: sequences that were measured to fit.
      bound: sequences that may fit at most; None where none was measured not to fit.
    """

    fits: int
    bound: int | None


def largest_that_fits(
    need: Callable[[int], int],
    first: int,
    limit: int,
    constant: float = 0,
    slack: float = 0,
) -> BatchSizeBounds:
    """Search the largest number of sequences that `need` at most `limit` bytes.

    Memory grows convexly and almost linearly with the batch. So the line between a size
    that fits and one that does not crosses the limit at a size that fits, close to the
    largest. From the fifth measurement on, every second one is the geometric mean:
    lines alone close in from one side.

    Args:
      need: bytes for a number of sequences.
      first: the number of sequences to start with.
      limit: available bytes.
      constant: bytes of `need` that do not depend on the sequences.
      slack: end when the bound exceeds the largest that fits by this share at most.

    Returns:
      the largest that fits (0: none), after `TRIES` measurements at most.
    """
    # The memory without a batch is known without a compilation, and gives the first
    # line its second point.
    sizes: dict[int, float] = {0: constant, first: need(first)}
    while True:
        fits = max((b for b in sizes if sizes[b] <= limit), default=0)
        fails = min(
            (b for b in sizes if b and sizes[b] > limit), default=MAX_SEARCHED + 1
        )
        tries = len(sizes) - 1
        if fails - 1 <= fits * (1 + slack) or tries == TRIES:
            return BatchSizeBounds(fits, fails - 1 if fails <= MAX_SEARCHED else None)
        low, high = fits, fails
        # One side is still open: the line goes through the two sizes whose needs are
        # nearest to the limit.
        if not fits or fails > MAX_SEARCHED:
            low, high = sorted(sorted(sizes, key=lambda b: abs(sizes[b] - limit))[:2])
        # At least 1: where a larger batch takes no more memory, as workspace may, the
        # slope would be 0 or negative.
        slope = max((sizes[high] - sizes[low]) / (high - low), 1)
        guess = low + int((limit - sizes[low]) / slope)
        if tries >= 4 and tries % 2 == 0:
            guess = math.isqrt(max(fits, 1) * fails)
        # A size within the slack would not bring the end closer.
        guess = max(guess, fits + 1, int(fits * (1 + slack)))
        guess = min(guess, fails - 1)
        sizes[guess] = need(guess)


class StepPlan(NamedTuple):
    """The plan of a step; figures are per device unless noted.

    Attributes:
      hardware: the GPUs and hosts.
      task: the task that is planned.
      sequences: B.
      accum: number of micro-batches.
      measured: the step.
      bf16: the same step in the precision `bf16`; None: not asked for, or the step
        itself does not fit.
      is_extrapolated: whether figures are extrapolated from two depths.
      layers: linear layers that are not FP8.
      largest: the largest B that fits, to `SLACK` where figures are extrapolated; None:
          not searched.
    """

    hardware: Hardware
    task: TrainTask
    sequences: int
    accum: int
    measured: Measured
    bf16: Measured | None
    is_extrapolated: bool
    layers: list[Layer]
    largest: BatchSizeBounds | None

    @property
    def spec(self) -> Spec:
        """The model's architecture."""
        return self.task.model.spec

    @property
    def tokens(self) -> int:
        """Tokens per step, over all devices and micro-batches."""
        per_device = self.sequences * self.spec.context
        return per_device * self.hardware.gpus * self.accum

    @property
    def fits(self) -> bool:
        """Whether the step fits in the memory that JAX may use."""
        return self.measured.peak <= self.hardware.usable

    @property
    def keys_to_try(self) -> list[str]:
        """Return the keys that lower the memory of a device and are not set yet."""
        keys = []
        if self.sequences > 1:
            keys.append("micro_batch=1")
        if self.spec.remat != "block":
            keys.append("model.remat=block")
        # Wide ends need blocks that are not scanned.
        can_scan = self.task.model.policy.wide_ends is None
        fsdp = self.task.mesh.shape["fsdp"]
        if fsdp > 1 and not self.spec.scan_layers and can_scan:
            keys.append("model.scan_layers=true")  # with remat: gathered by layer
        if fsdp == 1 and self.hardware.gpus > 1:
            keys.append("parallel=fsdp")
        keys.append("more gpus= with parallel=fsdp")
        return keys

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        memory = self.measured.group("memory")
        return round(memory["weights"] + memory["optimizer"])

    @property
    def fp8_flop_share(self) -> float:
        """FP8's share of the FLOPs of all matmuls and attentions."""
        flops = self.measured.group("flops")
        attention = self.measured.group("attention flops")
        total = sum(flops.values()) + sum(attention.values())
        narrow = sum(
            flops.get(name, 0.0) + attention.get(name, 0.0)
            for name in NARROW_NAMES.values()
        )
        if total:
            return narrow / total
        return 0.0

    @property
    def roofline_seconds(self) -> float:
        """Seconds per step: each kernel at its bound, or all collectives if they take
        longer.
        """
        return max(self.measured.group("seconds").values())

    @property
    def hidden_seconds(self) -> float:
        """Predicted seconds of collectives behind other kernels."""
        return sum(self.measured.group("hidden").values())

    def mfu_of(self, seconds: float) -> float:
        """Return the MFU of a step of `seconds`, as the trainer counts it."""
        is_fp32 = self.task.model.policy.compute == "fp32"
        width: Any = jnp.float32 if is_fp32 else jnp.bfloat16
        # As in training, the peak of 16 bits also for FP8: MFUs compare the speeds of
        # FP8 and bf16, and may exceed 1.
        peak = peak_flops(self.hardware.target.device, width)
        assert peak is not None
        flops_per_token = self.task.flops_per_token
        return mfu(self.tokens / seconds, flops_per_token, peak, self.hardware.gpus)

    @property
    def predicted_ratio(self) -> float | None:
        """Predicted speed relative to bf16; None where that was not compiled."""
        if self.bf16 is None:
            return None
        return self.bf16.seconds / self.measured.seconds

    def extra_kernels(self) -> dict[str, int]:
        """Return the number of kernels more (or fewer) than in bf16, by kind."""
        if self.bf16 is None:
            return {}
        kernels = self.measured.group("kernels")
        baseline = self.bf16.group("kernels")
        return {
            kind: round(kernels.get(kind, 0) - baseline.get(kind, 0))
            for kind in dict.fromkeys([*kernels, *baseline])
        }

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name: bytes, seconds, shares of 1."""
        m, bf16 = self.measured, self.bf16
        return {
            "peak_bytes_per_device": m.peak,
            "state_bytes": self.state_bytes,
            "fits": self.fits,
            "usable_bytes_per_device": self.hardware.usable,
            "memory": m.counts("memory"),
            "gemms": m.counts("gemms"),
            "gemm_kernels": m.counts("gemm kernels"),
            "attentions": m.counts("attentions"),
            "fp8_flop_share": self.fp8_flop_share,
            "not_fp8": {layer.path: layer.reason for layer in self.layers},
            "flops_per_token": self.task.flops_per_token,
            "kernels": m.kernels,
            "kernels_by_kind": m.counts("kernels"),
            "bytes_by_kind": m.counts("bytes"),
            "kernels_bf16": None if bf16 is None else bf16.kernels,
            "extra_kernels": self.extra_kernels(),
            "collectives": list(map(dataclasses.asdict, m.collectives)),
            "roofline_seconds": self.roofline_seconds,
            "mfu": self.mfu_of(self.roofline_seconds),
            "predicted": {
                "seconds": m.seconds,
                "hidden_collective_seconds": self.hidden_seconds,
                "tokens_per_s": self.tokens / m.seconds,
                "mfu": self.mfu_of(m.seconds),
                "times_as_fast_as_bf16": self.predicted_ratio,
                "classes": m.classes,
                "classes_bf16": None if bf16 is None else bf16.classes,
            },
            "micro_batch": self.sequences,
            "max_micro_batch": None if self.largest is None else self.largest.fits,
            "max_micro_batch_bound": (
                None if self.largest is None else self.largest.bound
            ),
            "continued_from_layers": list(DEPTHS) if self.is_extrapolated else None,
        }


def plan_step(
    task: TrainTask,
    batches: Batches,
    hardware: Hardware,
    *,
    sequences: int,
    accum: int,
    bf16: TrainTask | None = None,
    search: bool = False,
    exact: bool = False,
    log: Callable[[str], None] = lambda text: None,
    on_first_plan: Callable[[StepPlan], None] = lambda plan: None,
) -> StepPlan:
    """Compile the step of a task and read its figures.

    Args:
      task: on a mesh of `aot.make_target_mesh`'s devices.
      batches: from sequences of a device's micro-batch to the step's batch.
      hardware: the GPUs and hosts.
      sequences: of a device's micro-batch.
      accum: number of micro-batches.
      bf16: the same task in bf16, to compare with if the step fits; None: not
        compared.
      search: whether to search the largest micro-batch.
      exact: compile all layers, however many.
      log: receives messages about the progress.
      on_first_plan: receives the plan after the first compilation, without comparison
        and search.
    """
    model = task.model
    extrapolated = is_extrapolated(model.spec, model.policy, exact, task.trainable)
    with (
        no_compilation_cache(),
        # The two depths compile side by side.
        ThreadPoolExecutor(2) as pool,
        contextlib.ExitStack() as stack,
    ):
        # After an error or Ctrl-C no further program starts.
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)

        def measure_and_log(task: TrainTask, sequences: int, name: str) -> Measured:
            log(f"compiling {name}, {plural(sequences, 'sequence')} a device ...")
            measured = measure(
                task,
                batches(sequences),
                hardware,
                sequences,
                extrapolated=extrapolated,
                pool=pool,
                log=log,
            )
            peak = f"{measured.peak / GIB:.2f} GiB a device"
            fits = hardware.verdict(measured.peak)
            log(f"  {name}, {plural(sequences, 'sequence')}: {peak}, {fits}")
            return measured

        measured = measure_and_log(task, sequences, "the step")
        layers = not_fp8(
            measured.model,
            measured.compiled.program,
            sequences * model.spec.context,
            Gpu(hardware.target.device, hardware.target.capability),
            task.frozen_layers,
            task.mesh.shape["tensor"],
        )
        plan = StepPlan(
            hardware,
            task,
            sequences,
            accum,
            measured,
            bf16=None,
            is_extrapolated=extrapolated,
            layers=layers,
            largest=None,
        )
        # A comparison and a search compile for minutes: who only asks whether it fits
        # has read the answer by then.
        on_first_plan(plan)
        # A step that does not fit is not compared: its speed is of no use, and bf16
        # takes minutes.
        if bf16 is not None and plan.fits:
            compared = measure_and_log(bf16, sequences, "the same in bf16, to compare")
            plan = plan._replace(bf16=compared)
        if not search:
            return plan

        def need(b: int) -> int:
            # The search starts at the size of the plan: no second compilation.
            if b == sequences:
                return measured.peak
            return measure_and_log(task, b, "the step, in search of the largest").peak

        slack = SLACK if extrapolated else 0.0
        largest = largest_that_fits(
            need, sequences, hardware.usable, measured.constant_bytes, slack
        )
    return plan._replace(largest=largest)
