"""Verdicts on a run: is it learning, healthy, fast? Each has a grade and sentences."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from scalify_core.numerics.formats import FloatFormat
from trainer.observe.display import short
from trainer.precision.methods import METHODS
from trainer.report.history import AS_TRAINED, History, finite

GOOD, FAIR, BAD, UNRATED = "good", "fair", "bad", "unrated"
WORDS = {GOOD: "✓ yes", FAIR: "~ look closer", BAD: "✗ no", UNRATED: "not rated"}
RISEN = 0.02  # relative rise of the validation loss above its best that is reported
LEARNED = 0.02  # relative fall of the training loss that shows learning
LEVEL = 0.005  # relative change of the validation loss that counts as none
REREAD = 1.5  # epochs from which on the training text can be memorized
NOT_YET = "it has hardly begun, or does not learn"
RAW = 8  # bits per byte of unknown text
# relative standard error of the validation loss that is too large to judge by
UNSURE = 0.05
APART = 0.05  # relative gap of training below validation loss that is reported
SLOWER = 0.8  # share of its usual speed
SAVING = 5  # steps after a save during which it is still being written
WAITING = 0.1  # share of a step that is spent waiting for data
MACHINE = (
    " Other load on the machine may be the cause; it is not recorded, so this is not"
    " rated."
)
IDLE = 0.1  # MFU below which no run is called fast
# Classes of tensors that are cast to eight bits: the key of `precision` for the format,
# the suffix of their names, and their description.
NARROW = {
    "weights": ("forward", ".kernel", "the weights of"),
    "activations": ("forward", ".in", "the activations that go into"),
    "activation_gradients": ("backward", ".out", "the gradients of what comes out of"),
    "weight_gradients": ("weight_grad", ".kernel", "the weight gradients of"),
}
# keys of `precision`
FORMATS = ("compute", "forward", "backward", "weights", "weight_grad", "mu", "nu")
UNSEEN = (
    "The losses of the narrow formats are unknown: the numerics were not recorded."
    " metrics.numerics_every=250 records them."
)
# shares of a tensor's values, for "look closer" and "bad"
SATURATED = (0.01, 0.1)
# the same for the RMS of values rounded to zero, as a share of the tensor's RMS
LOST = (0.01, 0.1)
# A training loss jumps where it exceeds the median of the BEFORE losses before it by
# this share of it, and by this multiple of the usual deviation from such medians. The
# watchdog judges only from `watchdog.spike_window` losses on.
JUMP, DEVIATIONS, BEFORE = 0.2, 8.0, 8


@dataclass(frozen=True)
class Answer:
    """An answer: a grade, and the reason, most important line first."""

    question: str
    grade: str
    text: str


def learning(h: History) -> Answer:
    """Answer from the validation losses, or without them from the training losses."""
    validation = [(int(x), y) for x, y in zip(*finite(h.line("val/loss")), strict=True)]
    losses, all_losses = finite(h.line("train/loss"))[1], h.line("train/loss").ys
    question = "Is it learning?"
    late = all_losses[-max(1, len(all_losses) // 10) :]
    if sum(map(math.isfinite, late)) <= len(late) / 2:
        return Answer(
            question,
            BAD,
            f"Most of the last {len(late):,} training losses are not finite.",
        )
    if not all(map(math.isfinite, h.line("val/loss").ys[-1:])):
        return Answer(question, BAD, "The last validation loss is not finite.")
    if len(losses) < 2:
        return Answer(question, FAIR, "Too few steps to tell.")
    tenth = max(1, len(losses) // 10)
    # A run that starts from trained weights has no high first loss to fall from.
    begin, end = (losses[:tenth] if h.started_from else losses[:1]), losses[-tenth:]
    first, last = statistics.fmean(begin), statistics.fmean(end)
    fell = (
        f"The loss on its training text went from {first:.3f} nats a token"
        f"{_beside(h, len(begin))} to {last:.3f}"
    )
    moved, why = _moved(h, begin, end)
    if not validation:
        return Answer(question, moved, f"{fell}. There was no validation.{why}")
    at, value = validation[-1]
    comparable = h.comparable_validations
    best_at, best = min(comparable, key=lambda pair: pair[1])
    text = f"On unseen text the loss is {value:.3f} nats a token{_bits(h)}."
    weights = _in_other_precisions(h, at)
    if moved == BAD or (value >= first and not h.started_from):
        return Answer(
            question,
            BAD,
            f"{text} That is no better than at the start.\n{fell}.{weights}",
        )
    if moved == FAIR:
        return Answer(question, FAIR, f"{text}\n{fell}.{why}{weights}")
    if doubt := _near_guessing(h, value) or _too_few_tokens(h, at):
        return Answer(question, FAIR, f"{text} {doubt}\n{fell}.{weights}")
    newest_at, newest = comparable[-1]
    if newest > best * (1 + RISEN):
        over = " It memorizes its training text." if last < best else ""
        was = f"It was better, {best:.3f}, after step {best_at:,}"
        if newest_at != at:
            was = (
                f"On its first train.eval_batches the loss was better, {best:.3f},"
                f" after step {best_at:,} than after step {newest_at:,}, {newest:.3f}"
            )
        return Answer(question, FAIR, f"{text} {was}.\n{fell}.{over}{weights}")
    course = _course(comparable, h.rows[0]["step"] - 1)
    apart = _apart(h, value, last)
    return Answer(question, GOOD, f"{text}{course}\n{fell}{apart}.{weights}")


def _moved(h: History, begin: Sequence[float], end: Sequence[float]) -> tuple[str, str]:
    """Return a grade of the training loss, and a sentence where that is not good.

    A run that starts from trained weights may stay at its first loss, which is good. It
    is called worse only where the rise exceeds two standard errors, because losses of
    single steps vary.

    Args:
      h: the run.
      begin: training losses of its first steps.
      end: training losses of its last steps.
    """
    first, last = statistics.fmean(begin), statistics.fmean(end)
    if h.started_from:
        error = math.hypot(
            *(
                statistics.stdev(part) / math.sqrt(len(part))
                for part in (begin, end)
                if len(part) > 1
            )
        )
        has_risen = last > first * (1 + RISEN) and last - first > 2 * error
        if has_risen and len(begin) > 1:
            worse = f"{last / first - 1:.1%}"
            return FAIR, f" That is worse than at its start, by {worse}."
        return GOOD, ""
    if last >= first:
        return BAD, ""
    if last > first * (1 - LEARNED):
        return FAIR, f" That is a fall of less than {LEARNED:.0%}: {NOT_YET}."
    return GOOD, ""


def _beside(h: History, steps: int) -> str:
    """Return the context of the first loss, the mean of some steps: the start weights,
    or the loss of guessing.
    """
    if h.started_from:
        mean = f"mean of the first {steps:,} steps, " if steps > 1 else ""
        return f" ({mean}{h.started_from})"
    ids = h.number("vocabulary")
    return f" (blind guessing among {ids:,} tokens: {math.log(ids):.3f})" if ids else ""


def _near_guessing(h: History, value: float) -> str:
    """Return a sentence where the validation loss is hardly below that of guessing."""
    ids, bits = h.number("vocabulary"), finite(h.line("val/bits_per_byte"))[1][-1:]
    if ids > 1 and value > (1 - LEARNED) * math.log(ids):
        return (
            f"Blind guessing among {ids:,} tokens comes to {math.log(ids):.3f}:"
            f" {NOT_YET}."
        )
    if bits and bits[0] > (1 - LEARNED) * RAW:
        return f"Unknown text takes as many bits: {NOT_YET}."
    return ""


def _too_few_tokens(h: History, step: int) -> str:
    """Return a sentence where the validation after a step read too little to judge by.

    The standard deviation of a token's loss is about its mean, so the mean of n tokens
    is known to 2 / sqrt(n) of itself.
    """
    tokens = h.number("validation tokens")
    tokens = min(tokens, h.validated_tokens(step) or tokens)
    if tokens == 0 or 2 / math.sqrt(tokens) <= UNSURE:
        return ""
    return (
        f"It is the mean of {tokens:,} tokens only, which is accurate to about"
        f" ±{2 / math.sqrt(tokens):.0%}: too few to judge by; increase"
        " data.val_fraction."
    )


def _bits(h: History) -> str:
    """Return the loss in bits per byte of text, beside those of a compressor."""
    bits, packed = (
        finite(h.line(f"val/{key}"))[1][-1:]
        for key in ("bits_per_byte", "xz_bits_per_byte")
    )
    if not bits:
        return ""
    beside = ""
    if packed:
        beside = (
            " and the compressor xz, which has not read the training text, needs"
            f" {packed[0]:.2f}"
        )
    return f": {bits[0]:.2f} bits per byte, where raw text has {RAW}{beside}"


def _course(validation: list[tuple[int, float]], begin: int) -> str:
    """Return a sentence about the validation loss in the last quarter of the run.

    `begin` is the step before the run's first one.
    """
    end, value = validation[-1]
    steps = end - begin
    third_quarter = [
        (step, y)
        for step, y in validation
        if begin + steps / 2 <= step <= begin + 0.75 * steps
    ]
    if not third_quarter:
        return ""
    step, earlier = third_quarter[-1]
    fell = 1 - value / earlier
    if fell > LEVEL:
        return (
            f"\nSince step {step:,} it still fell by {fell:.1%}: a longer run may come"
            " further."
        )
    course = f"rose by {-fell:.1%}" if fell < -LEVEL else "was level"
    return f"\nSince step {step:,} it {course}."


def _apart(h: History, value: float, last: float) -> str:
    """Return the gap between training and validation loss, and a possible reason."""
    share = 1 - last / value
    if share < APART:
        return ""
    text = f", {share:.0%} below the loss on unseen text"
    if not h.epochs:
        return text
    reason = "which is hardly memorized: the texts differ"
    if h.epochs >= REREAD:
        reason = "part of it may be memorized"
    return f"{text}. It was read {h.epochs:.1f} times, {reason}"


def _in_other_precisions(h: History, step: int) -> str:
    """Return a line about the evaluation of that step's weights in other precisions."""
    if h.evaluation is None or h.evaluation.step != step:
        return ""
    as_trained = h.evaluation.losses[AS_TRAINED]
    listed = ", ".join(
        f"{loss:.4f} in {name} ({loss / as_trained - 1:+.2%})"
        for name, loss in h.evaluation.losses.items()
        if name != AS_TRAINED
    )
    return (
        f"\nOn {h.evaluation.tokens:,} tokens of that text the loss of the same weights"
        f" is {as_trained:.4f} as trained, {listed}: the cost of the precision in use,"
        " not in training."
    )


def healthy(h: History) -> Answer:
    """Answer from the events, the watchdog's counts and the numerics."""
    question, last = "Is it healthy?", h.rows[-1]
    skipped = int(last.get("watchdog/skipped", 0))
    rollbacks = int(last.get("watchdog/rollbacks", 0))
    texts = [text for _, text in h.events]
    counts = {
        "skipped (not finite)": skipped,
        "rolled back": rollbacks,
        "spiking": sum(": spike" in text for text in texts),
        "stalled": sum(text.startswith("stalled") for text in texts),
        "ended because it hung": sum(text.startswith("no progress") for text in texts),
        "ended because it did not stop": sum(
            text.startswith("not stopped within") for text in texts
        ),
    }
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    jump = "" if counts["spiking"] else _jumps(h)
    lost_grade, numerics = _narrow_losses(h)
    stopped = [text for text in texts if text.startswith("stopped")]
    if stopped:
        return Answer(
            question,
            BAD,
            f"The watchdog stopped it: {stopped[-1].removeprefix('stopped: ')}.",
        )
    if jump and not listed:
        return Answer(
            question,
            BAD if lost_grade == BAD else FAIR,
            f"No step was skipped, nothing rolled back, no stall. {jump}{numerics}",
        )
    if not listed and not h.numerics and is_narrow(h.settings):
        return Answer(
            question,
            UNRATED,
            f"No step was skipped, nothing rolled back, no spike, no stall. {UNSEEN}",
        )
    if not listed:
        return Answer(
            question,
            lost_grade,
            f"No step was skipped, nothing rolled back, no spike, no stall.{numerics}",
        )
    grade = BAD if skipped > 0.01 * len(h.rows) or lost_grade == BAD else FAIR
    return Answer(
        question,
        grade,
        f"In {len(h.rows):,} steps: {listed}; see the events below. {jump}{numerics}",
    )


def _jumps(h: History) -> str:
    """Return a sentence about the jumps of the training loss; empty: there are none.

    Losses in a row that jump are one jump.
    """
    steps, losses = finite(h.line("train/loss"))
    medians = [
        statistics.median(losses[max(0, i - BEFORE) : i]) for i in range(2, len(losses))
    ]
    above = [y - median for y, median in zip(losses[2:], medians, strict=True)]
    if not above:
        return ""
    usual = 1.4826 * statistics.median(map(abs, above))  # sigma, of normal deviations
    is_jump = [
        rise > max(JUMP * median, DEVIATIONS * usual)
        for rise, median in zip(above, medians, strict=True)
    ]
    count = sum(
        new and not old for new, old in zip(is_jump, [False, *is_jump], strict=False)
    )
    if not count:
        return ""
    i = max((i for i, jumped in enumerate(is_jump) if jumped), key=above.__getitem__)
    largest = (
        f"from a median of {medians[i]:.3g} to {losses[i + 2]:.3g} in step"
        f" {steps[i + 2]:,.0f}"
    )
    if count == 1:
        return f"The training loss jumped {largest}."
    return f"The training loss jumped {count} times, at most {largest}."


def is_narrow(settings: Mapping[str, Any]) -> bool:
    """Return whether any format of a run is narrower than FP32.

    `settings`: by dotted keys.
    """
    formats = (settings.get(f"precision.{key}") for key in FORMATS)
    return any(form not in (None, "fp32") for form in formats)


class Loss(NamedTuple):
    """The loss of a tensor in a narrow format.

    Attributes:
      size: its severity, which is graded.
      share: the affected share of the tensor's values.
      tensor: the tensor's class and name, in words.
    """

    size: float
    share: float
    tensor: str


def losses(
    figures: Mapping[str, float],
    settings: Mapping[str, Any],
    wide: Sequence[str],
    figure: str,
) -> dict[str, Loss]:
    """Return the worst loss of each tensor class, among tensors that are cast to FP8.

    Values that underflowed were at most half the format's smallest number. So their RMS
    is at most sqrt(share) times that, which is divided by the tensor's own RMS. It is
    small where only the smallest of many values are lost, as in GELU's outputs. Under
    scales that the tensor does not have, the share itself is an upper bound
    (`numerics`), so nothing is returned.

    Args:
      figures: `numerics/CLASS/LAYER/FIGURE`.
      settings: of the run, by dotted keys.
      wide: paths of the linear layers that are not cast; `h.*.mlp.c_fc` for stacks.
      figure: `underflow` or `saturated`.
    """
    underflow = figure == "underflow"
    method = METHODS.get(settings.get("precision.scaling", ""))
    # Under these methods the recorded share is a bound, not a measurement.
    if underflow and method is not None and method.in_products:
        return {}
    worst: dict[str, Loss] = {}
    for key, share in figures.items():
        _, kind, name, counted = key.split("/")
        cast = _cast(kind, name, settings, wide)
        if counted != figure or cast is None or not share > 0:
            continue
        tensor, form = cast
        rms = figures.get(f"numerics/{kind}/{name}/rms", math.nan)
        size = share
        if underflow and rms > 0:
            size = min(1.0, math.sqrt(share) * form.min_subnormal / 2 / rms)
        loss = Loss(size, share, tensor)
        worst[kind] = max(worst.get(kind, loss), loss)
    return worst


def _cast(
    kind: str, name: str, settings: Mapping[str, Any], wide: Sequence[str]
) -> tuple[str, FloatFormat] | None:
    """Return a tensor's description and the format that it is cast to.

    None: it is not cast, or that is unknown.
    """
    key, suffix, words = NARROW.get(kind, ("", "", ""))
    form = settings.get(f"precision.{key}")
    forward = settings.get("precision.forward")
    if form is None or forward is None or not name.endswith(suffix):
        return None
    layer = name.removesuffix(suffix)
    is_linear = layer.rpartition(".")[2].startswith("c_")
    if not is_linear or any(fnmatchcase(layer, path) for path in wide):
        return None
    return f"{words} {layer}", FloatFormat.parse(form)


def _narrow_losses(h: History) -> tuple[str, str]:
    """Return the grade of the last measured losses of FP8, and a line for each kind."""
    grades, text = [GOOD], ""
    figures = h.numerics[-1][1] if h.numerics else {}
    for figure, (fair, bad), verb in (
        ("saturated", SATURATED, "Saturated"),
        ("underflow", LOST, "Rounded to zero"),
    ):
        by_class = losses(figures, h.settings, h.wide_layers, figure)
        if not by_class:
            continue
        worst = max(by_class.values())
        grade = GOOD
        if worst.size >= fair:
            grade = FAIR
        if worst.size >= bad:
            grade = BAD
        grades.append(grade)
        judgment = "harmless below" if grade == GOOD else "too much from"
        amount = f"at most {worst.size:.2%} of their RMS"
        if figure == "saturated":
            amount = f"{worst.share:.1%} of the values"
        text += (
            f"\n{verb} by the narrow format, in the worst layer of the last"
            f" measurement: {amount}, {worst.tensor} ({judgment} {fair:.0%})."
        )
    return max(grades, key=(GOOD, FAIR, BAD).index), text


def fast(h: History) -> Answer:
    """Answer from throughput, its course, waiting for data, and MFU if known."""
    question = "Is it fast?"
    _, speeds = finite(h.line("perf/tokens_per_s"))
    if not speeds:
        return Answer(question, FAIR, "No throughput was recorded.")
    usual, tenth = statistics.median(speeds), max(1, len(speeds) // 10)
    late = statistics.median(speeds[-tenth:])
    step_ms = statistics.median(h.line("perf/step_ms").ys)
    waited = statistics.median(h.line("perf/data_ms").ys) / step_ms
    _, shares = finite(h.line("perf/mfu"))
    use = ""
    if shares:
        use = f", {statistics.median(shares):.1%} of the devices' peak"
    text = (
        f"{short(usual)} tokens/s, {step_ms:,.1f} ms a step{use}; {waited:.1%} of it"
        " waiting for data."
    )
    taken = timedelta(seconds=round(3600 * h.clock.hours[-1]))
    text += f"\nIts steps took {taken} (h:mm:ss)."
    if waited > WAITING:
        return Answer(question, FAIR, f"{text}\nWaiting for data slows it down.")
    if late < SLOWER * usual:
        return Answer(
            question,
            UNRATED,
            f"{text}\nIt slowed down: {short(late)} tokens/s at the end.{MACHINE}",
        )
    if (slow := sorted(speeds)[len(speeds) // 10]) < SLOWER * usual:
        unsteady = (
            f"It is unsteady: the slowest tenth of its steps ran at {short(slow)}"
            " tokens/s or less."
        )
        return Answer(question, UNRATED, f"{text}\n{unsteady}{MACHINE}")
    if shares and statistics.median(shares) < IDLE:
        return Answer(
            question,
            FAIR,
            f"{text}\nThat is little; a larger batch or model uses more.",
        )
    text += f"\nSteady to the end{_slow_steps(h, SLOWER * usual)}."
    if shares:
        return Answer(question, GOOD, text)
    return Answer(
        question, UNRATED, f"{text}\nThe peak rate of this device is not known."
    )


def _slow_steps(h: History, limit: float) -> str:
    """Return the number of steps below `limit` tokens/s, and of those during a save."""
    line = h.line("perf/tokens_per_s")
    slow = [
        int(step) for step, speed in zip(line.xs, line.ys, strict=True) if speed < limit
    ]
    if not slow:
        return ""
    every = h.settings.get("checkpoint.every")
    saving = 0
    if every:
        for step in slow:
            since_save = step - every * ((step - 1) // every)
            saving += step > every and 0 < since_save <= SAVING
    beside = f", {saving} of them while a checkpoint was being written" * bool(saving)
    return (
        f"; of {len(line.xs):,} timed steps {len(slow):,} fell below {SLOWER:.0%} of"
        f" that speed{beside}"
    )
