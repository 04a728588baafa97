"""A GPU plan without a GPU: what the compiled train step of a configuration needs and
does on a described target.

Everything is of one device. What a deep model's step needs is linear in its layers,
which are all alike: past `EXACT` unrolled layers the step is compiled at the two
`DEPTHS` and continued from there, and the plan says so.

Legend: B sequences of a device's micro-batch, T tokens of each, N = B*T.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax.numpy as jnp

from trainer.compiled.fp8 import Gpu, Layer, not_fp8
from trainer.models.family import Spec
from trainer.observe.metrics import GIB, mfu
from trainer.observe.peaks import peak_flops
from trainer.plan.aot import (
    Compiled,
    compile_for_target,
    lower_for_target,
    written_to_no_cache,
)
from trainer.plan.figures import Aim, Figures, continued, figures_of
from trainer.plan.times import predicted
from trainer.precision.policy import Policy
from trainer.step.kernels import gpu_options
from trainer.step.step import Tokens
from trainer.workload import Model, TrainTask, lower_step

EXACT = 12  # unrolled layers that are compiled whole
# with fewer the peak can be in the head or the optimizer; nearer ones multiply the gaps
# of memory
DEPTHS = (6, 12)
TRIES = 12  # measurements at most, in search of the largest micro-batch
# of it, where figures are continued: they are not good to the last sequence
SLACK = 0.05


class Measured(NamedTuple):
    """A step's figures, and the program that they are of or, of a deep model, the
    larger of the two.
    """

    figures: Figures
    model: Model
    compiled: Compiled

    @property
    def peak(self) -> int:
        """Bytes of a device."""
        return round(
            sum(size for (group, *_), size in self.figures.items() if group == "memory")
        )

    @property
    def constant(self) -> float:
        """Bytes of a device that do not depend on the batch."""
        memory = self.group("memory")
        return sum(
            memory[kind]
            for kind in ("weights", "optimizer", "FP8 weights", "gradients")
        )

    @property
    def seconds(self) -> float:
        """Of a step, as predicted: see `trainer.plan.times`."""
        return sum(self.group("predicted").values())

    def group(self, name: str) -> dict[str, float]:
        """The figures `(name, key)` by key."""
        return {
            " ".join(keys): value
            for (group, *keys), value in self.figures.items()
            if group == name
        }


Batches = Callable[[int], Tokens]  # from B to the step's batch


def is_continued(
    spec: Spec, policy: Policy, exact: bool, trainable: tuple[str, ...] = ()
) -> bool:
    """Whether a step is continued from two depths: layers that are chosen by number
    have no counterpart in both.
    """
    patterns = (
        *policy.fp8_modules,
        *policy.exclude,
        *(policy.backward_e4m3 or ()),
        *trainable,
    )
    by_number = any(
        c.isdigit() for pattern in patterns for c in pattern.split(".")[1:2]
    )
    return not (exact or spec.scan_layers or spec.n_layer <= EXACT or by_number)


class Compiler:
    """Compiles steps for B sequences, whole or at two depths, and reads them.

    Args:
      batches: from B to the step's batch.
      aim: what for.
      exact: compile all layers, however many.
      pool: compiles, a core for each program; tracing is left to the caller's thread,
          as `lower_for_target` wants.
    """

    def __init__(
        self, batches: Batches, aim: Aim, *, exact: bool, pool: ThreadPoolExecutor
    ) -> None:
        self._batches, self._aim, self._exact, self._pool = batches, aim, exact, pool

    def start(self, task: TrainTask, sequences: int) -> Callable[[], Measured]:
        """Begin, and give what waits for the end."""
        spec, tokens = task.model.spec, sequences * task.model.spec.context
        is_split = is_continued(spec, task.model.policy, self._exact, task.trainable)
        models = (
            [
                Model.make(dataclasses.replace(spec, n_layer=n), task.model.policy)
                for n in DEPTHS
            ]
            if is_split
            else [task.model]
        )

        def started(model: Model) -> Future[Compiled]:
            step = functools.partial(
                lower_step, task._replace(model=model), self._batches(sequences)
            )
            options = gpu_options(model.policy, task.kernels)
            return self._pool.submit(
                compile_for_target, lower_for_target(step), options
            )

        # the one that takes longest is begun first
        running = [started(model) for model in reversed(models)][::-1]

        def end() -> Measured:
            parts = [part.result() for part in running]
            figures = [
                figures_of(part, self._aim, tokens, spec.padded_vocab)
                | predicted(part.program, self._aim)
                for part in parts
            ]
            whole = (
                continued(figures[0], figures[1], DEPTHS, spec.n_layer)
                if is_split
                else figures[0]
            )
            return Measured(whole, models[-1], parts[-1])

        return end


class Fitting(NamedTuple):
    """How many sequences of a micro-batch fit: `fits` of them do, which was measured,
    and perhaps up to `bound`.

    None: no bound was found, the search having ended first.
    """

    fits: int
    bound: int | None


def largest_that_fits(
    need: Callable[[int], int],
    first: int,
    limit: int,
    constant: float = 0,
    slack: float = 0,
    most: int = 4096,
) -> Fitting:
    """The largest number of sequences that `need` at most `limit` bytes, `constant` of
    them always; 0: not even one.

    With `slack`, the search ends where the largest exceeds what was found to fit by no
    more than this share.

    `need` grows, and ever faster, but nearly linearly. So what a line through a number
    that fits and one that does not lets fit does fit, and no more fits than a line
    through two that do. The one or the other is measured next; where the lines are far
    apart, as of a need that is flat for long and then steep, and from the fifth
    measurement on every other time, a number between the two. It ends after `TRIES`,
    and at `most`.
    """
    known = {first: need(first)}

    def reached(a: int, b: int) -> int:
        rise = (known[b] - known[a]) / (b - a)
        return int(a + (limit - known[a]) // rise) if rise > 0 else most

    while True:
        fitting = sorted(b for b, size in known.items() if size <= limit)
        fits, fails = (
            max(fitting, default=0),
            min((b for b, size in known.items() if size > limit), default=most + 1),
        )
        top = min(reached(*fitting[-2:]) if len(fitting) > 1 else most, fails - 1)
        if top <= fits * (1 + slack) or len(known) == TRIES:
            return Fitting(fits, None if top == most else max(top, fits))
        if len(known) == 1:
            guess = int(
                first * max(limit - constant, 0) / max(known[first] - constant, 1)
            )
        elif fits and fails <= most:
            guess = reached(fits, fails)
        else:
            guess = reached(
                *sorted(sorted(known, key=lambda b: abs(known[b] - limit))[:2])
            )
        if len(known) > 1 and (guess <= fits or len(known) in (5, 7, 9, 11)):
            guess = math.isqrt(max(fits, 1) * (top + 1))
        guess = min(max(guess, fits + 1), top)
        known[guess] = need(guess)


class Plan(NamedTuple):
    """What a step needs and does, of one device where nothing else is said.

    Attributes:
      sequences: B.
      tokens: of a step, over all devices and micro-batches.
      measured: the step; bf16: the same in the precision `bf16`, None where it was not
          asked for.
      is_continued: whether their figures are continued from two depths.
      flops_per_token: of the training step, see `flops`.
      layers: linear layers that are not FP8.
      largest: the largest B that fits, to `SLACK` where figures are continued; None:
          not searched.
    """

    aim: Aim
    spec: Spec
    sequences: int
    tokens: int
    compute: str
    measured: Measured
    bf16: Measured | None
    is_continued: bool
    flops_per_token: int
    layers: list[Layer]
    largest: Fitting | None

    @property
    def fits(self) -> bool:
        """Return whether JAX lets a program have so much."""
        return self.measured.peak <= self.aim.usable

    @property
    def state_bytes(self) -> int:
        """Of weights and optimizer."""
        memory = self.measured.group("memory")
        return round(memory["weights"] + memory["optimizer"])

    @property
    def fp8_flop_share(self) -> float:
        """Of the FLOPs of all matrix products and attentions."""
        flops, attention = (
            self.measured.group("flops"),
            self.measured.group("attention flops"),
        )
        total = sum(flops.values()) + sum(attention.values())
        return flops.get("fp8", 0.0) / total if total else 0.0

    @property
    def roofline_seconds(self) -> float:
        """Of a step: every kernel at its own bound, collectives not overlapped."""
        return sum(self.measured.group("seconds").values())

    def mfu_of(self, seconds: float) -> float:
        """Of a step that takes so long, against the peak of the compute dtype, as the
        trainer counts it.
        """
        width: Any = jnp.float32 if self.compute == "fp32" else jnp.bfloat16
        peak = peak_flops(self.aim.target.device, width)
        assert peak is not None
        return mfu(self.tokens / seconds, self.flops_per_token, peak, self.aim.gpus)

    @property
    def predicted_ratio(self) -> float | None:
        """How many times as fast as bf16 it is predicted to be; None where that was not
        compiled.
        """
        return None if self.bf16 is None else self.bf16.seconds / self.measured.seconds

    def extra_kernels(self) -> dict[str, int]:
        """Kernels by kind, more (or fewer) than in bf16."""
        if self.bf16 is None:
            return {}
        ours, theirs = self.measured.group("kernels"), self.bf16.group("kernels")
        return {
            kind: round(ours.get(kind, 0) - theirs.get(kind, 0))
            for kind in dict.fromkeys([*ours, *theirs])
        }

    def as_json(self) -> dict[str, Any]:
        """The figures by name: bytes, seconds, shares of 1."""
        m = self.measured
        runs, sent = m.group("collective runs"), m.group("sent")
        return {
            "peak_bytes_per_device": m.peak,
            "state_bytes": self.state_bytes,
            "fits": self.fits,
            "usable_bytes_per_device": self.aim.usable,
            "memory": _rounded(m.group("memory")),
            "gemms": _rounded(m.group("gemms")),
            "gemm_kernels": _rounded(m.group("gemm kernels")),
            "attentions": _rounded(m.group("attentions")),
            "fp8_flop_share": self.fp8_flop_share,
            "not_fp8": {layer.path: layer.reason for layer in self.layers},
            "flops_per_token": self.flops_per_token,
            "kernels": round(sum(m.group("kernels").values())),
            "kernels_by_kind": _rounded(m.group("kernels")),
            "bytes_by_kind": _rounded(m.group("bytes")),
            "kernels_bf16": (
                None
                if self.bf16 is None
                else round(sum(self.bf16.group("kernels").values()))
            ),
            "extra_kernels": self.extra_kernels(),
            "collectives": [
                {
                    "op": op,
                    "dtype": dtype,
                    "bytes": round(size),
                    "sent_bytes_per_device": round(sent[f"{op} {dtype}"]),
                    "count": round(runs[f"{op} {dtype}"]),
                }
                for (op, dtype), size in (
                    (key.split(" "), size)
                    for key, size in m.group("collectives").items()
                )
            ],
            "roofline_seconds": self.roofline_seconds,
            "mfu": self.mfu_of(self.roofline_seconds),
            "predicted": {
                "seconds": m.seconds,
                "tokens_per_s": self.tokens / m.seconds,
                "mfu": self.mfu_of(m.seconds),
                "times_as_fast_as_bf16": self.predicted_ratio,
                "classes": _classes(m),
                "classes_bf16": None if self.bf16 is None else _classes(self.bf16),
            },
            "micro_batch": self.sequences,
            "max_micro_batch": None if self.largest is None else self.largest.fits,
            "max_micro_batch_bound": (
                None if self.largest is None else self.largest.bound
            ),
            "continued_from_layers": list(DEPTHS) if self.is_continued else None,
        }


def _classes(measured: Measured) -> dict[str, dict[str, float]]:
    launches = measured.group("launches")
    return {
        kind: {"seconds": seconds, "launches": round(launches[kind])}
        for kind, seconds in measured.group("predicted").items()
    }


def _rounded(figures: dict[str, float]) -> dict[str, int]:
    return {name: round(value) for name, value in figures.items()}


def make_plan(
    task: TrainTask,
    batches: Batches,
    aim: Aim,
    *,
    sequences: int,
    accum: int,
    bf16: TrainTask | None = None,
    search: bool = True,
    exact: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compile and read the step of a task.

    Args:
      task: on a mesh of `aot.make_target_mesh`'s devices.
      batches: from sequences of a device's micro-batch to the step's batch.
      aim: what for.
      sequences: of a device's micro-batch.
      accum: micro-batches.
      bf16: the same in bf16, to compare with; None: not compared.
      search: for the largest micro-batch.
      exact: compile all layers, however many.
      say: is told what is compiled.
    """
    split = is_continued(task.model.spec, task.model.policy, exact, task.trainable)
    with (
        written_to_no_cache(),
        ThreadPoolExecutor(2) as pool,
        contextlib.ExitStack() as stack,
    ):
        # after an error or Ctrl-C no more are begun
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        compiler = Compiler(batches, aim, exact=exact, pool=pool)

        def started(of: TrainTask, sequences: int, name: str) -> Callable[[], Measured]:
            say(f"compiling {name}, {sequences} sequences a device ...")
            end = compiler.start(of, sequences)

            def measured() -> Measured:
                found = end()
                say(
                    f"  {name}, {sequences} sequences: {found.peak / GIB:.2f} GiB a"
                    " device"
                )
                return found

            return measured

        end = started(task, sequences, "the step")
        end_bf16 = (
            None if bf16 is None else started(bf16, sequences, "the same in bf16")
        )
        first = end()

        def need(b: int) -> int:
            return first.peak if b == sequences else started(task, b, "the step")().peak

        slack = SLACK if split else 0.0
        largest = (
            largest_that_fits(need, sequences, aim.usable, first.constant, slack)
            if search
            else None
        )
        other = None if end_bf16 is None else end_bf16()
    model, tokens = task.model, sequences * task.model.spec.context
    gpu = Gpu(aim.target.device, aim.target.capability)
    return Plan(
        aim=aim,
        spec=model.spec,
        flops_per_token=task.flops_per_token,
        sequences=sequences,
        tokens=tokens * aim.gpus * accum,
        compute=model.policy.compute,
        measured=first,
        bf16=other,
        is_continued=split,
        layers=not_fp8(
            first.model, first.compiled.program, tokens, gpu, task.frozen_layers
        ),
        largest=largest,
    )
