"""Three questions about a run, each answered in a grade and a few sentences: is it
learning, healthy, fast?
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from scalify_core.formats import FloatFormat
from trainer.observe.display import short
from trainer.precision.methods import METHODS
from trainer.report.history import AS_TRAINED, History, finite

GOOD, FAIR, BAD, UNRATED = "good", "fair", "bad", "unrated"
WORDS = {GOOD: "✓ yes", FAIR: "~ look closer", BAD: "✗ no", UNRATED: "not rated"}
RISEN = 0.02  # share by which a validation loss above the best one is worth a word
LEARNT = 0.02  # share by which the training loss has to fall
LEVEL = 0.005  # a smaller fall of the validation loss, over the last quarter, is none
REREAD = 1.5  # readings of the training text from which on it can be known by heart
NOT_YET = "it has hardly begun, or does not learn"
RAW = 8  # bits a byte of text that nothing is known of
# share by which a validation loss may be off, from which on it tells too little
UNSURE = 0.05
APART = 0.05  # share by which a training loss below the validation loss is worth a word
SLOWER = 0.8  # share of its usual speed
SAVING = 5  # steps after a save in which it is still being written
WAITING = 0.1  # share of a step spent waiting for data
MACHINE = (
    " Whatever else ran on the machine may have done that; it is not recorded, so this"
    " is not judged."
)
IDLE = 0.1  # MFU below which no run is called fast
# What is cast to eight bits: the key of `precision` that says to which, how its
# tensors' names end, and in words.
NARROW = {
    "weights": ("forward", ".kernel", "the weights of"),
    "activations": ("forward", ".in", "the activations that go into"),
    "activation_gradients": ("backward", ".out", "the gradients of what comes out of"),
    "weight_gradients": ("weight_grad", ".kernel", "the weight gradients of"),
}
# keys of `precision`
FORMATS = ("compute", "forward", "backward", "weights", "weight_grad", "mu", "nu")
UNSEEN = (
    "What the narrow formats lose is not known: the numerics were not recorded."
    " metrics.numerics_every=250 does that."
)
# share of a tensor: from which on to look closer, and from which on it is bad
SATURATED = (0.01, 0.1)
# the same for the RMS of what becomes zero, as a share of the tensor's
LOST = (0.01, 0.1)


@dataclass(frozen=True)
class Answer:
    """The answer to a question: a grade, and why; the most important comes first, then
    details, a line each.
    """

    question: str
    grade: str
    text: str


def learning(h: History) -> Answer:
    """The answer from the validation losses, or from the training losses where there
    are not two of those.
    """
    validation = [(int(x), y) for x, y in zip(*finite(h.line("val/loss")), strict=True)]
    losses, all_losses = finite(h.line("train/loss"))[1], h.line("train/loss").ys
    question = "Is it learning?"
    late = all_losses[-max(1, len(all_losses) // 10) :]
    if sum(map(math.isfinite, late)) <= len(late) / 2:
        return Answer(
            question,
            BAD,
            f"Of the last {len(late):,} training losses most are not finite.",
        )
    if not all(map(math.isfinite, h.line("val/loss").ys[-1:])):
        return Answer(question, BAD, "The last validation loss is not finite.")
    if len(losses) < 2:
        return Answer(question, FAIR, "Too few steps to tell.")
    tenth = max(1, len(losses) // 10)
    # What begins with weights that have learned has no first step that all others must
    # be far below.
    begin, end = (losses[:tenth] if h.began else losses[:1]), losses[-tenth:]
    first, last = statistics.fmean(begin), statistics.fmean(end)
    fell = (
        f"The loss on its training text went from {first:.3f} nats a token{_beside(h)}"
        f" to {last:.3f}"
    )
    moved, why = _moved(h, begin, end)
    if not validation:
        return Answer(question, moved, f"{fell}. There was no validation.{why}")
    at, value = validation[-1]
    best_at, best = min(validation, key=lambda pair: pair[1])
    text = f"On text it never saw the loss is {value:.3f} nats a token{_bits(h)}."
    weights = _elsewhere(h, at)
    if moved == BAD or (value >= first and not h.began):
        return Answer(
            question,
            BAD,
            f"{text} That is no better than at the start.\n{fell}.{weights}",
        )
    if moved == FAIR:
        return Answer(question, FAIR, f"{text}\n{fell}.{why}{weights}")
    if doubt := _by_chance(h, value) or _by_few(h):
        return Answer(question, FAIR, f"{text} {doubt}\n{fell}.{weights}")
    if value > best * (1 + RISEN):
        over = " It learns its training text by heart." if last < best else ""
        return Answer(
            question,
            FAIR,
            f"{text} It was better, {best:.3f}, after step"
            f" {best_at:,}.\n{fell}.{over}{weights}",
        )
    course = _course(validation, h.rows[0]["step"] - 1)
    apart = _apart(h, value, last)
    return Answer(question, GOOD, f"{text}{course}\n{fell}{apart}.{weights}")


def _moved(h: History, begin: Sequence[float], end: Sequence[float]) -> tuple[str, str]:
    """The grade of what became of the training loss, and a sentence where that is not
    good.

    A run that begins with weights may stay where it begins, which is good already. That
    it is worse than that is said where the losses of single steps, which vary, are
    enough to say so: two standard errors.

    Args:
      h: the run.
      begin, end: training losses of its first steps, and of its last.
    """
    first, last = statistics.fmean(begin), statistics.fmean(end)
    if h.began:
        error = math.hypot(
            *(
                statistics.stdev(part) / math.sqrt(len(part))
                for part in (begin, end)
                if len(part) > 1
            )
        )
        risen = (
            last > first * (1 + RISEN) and last - first > 2 * error and len(begin) > 1
        )
        return (
            (
                FAIR,
                f" That is worse than what it began with, by {last / first - 1:.1%}.",
            )
            if risen
            else (GOOD, "")
        )
    if last >= first:
        return BAD, ""
    little = f" That is a fall of less than {LEARNT:.0%}: {NOT_YET}."
    return (FAIR, little) if last > first * (1 - LEARNT) else (GOOD, "")


def _beside(h: History) -> str:
    """What is to be known of the first loss: what the run began with, or what guessing
    without a look would lose.
    """
    if h.began:
        return f" ({h.began})"
    ids = h.number("vocabulary")
    return f" (blind guessing among {ids:,} tokens: {math.log(ids):.3f})" if ids else ""


def _by_chance(h: History, value: float) -> str:
    """A sentence where the validation loss is that of guessing, whatever became of the
    training loss; else empty.
    """
    ids, bits = h.number("vocabulary"), finite(h.line("val/bits_per_byte"))[1][-1:]
    if ids > 1 and value > (1 - LEARNT) * math.log(ids):
        return (
            f"Blind guessing among {ids:,} tokens comes to {math.log(ids):.3f}: it has"
            " hardly begun, or does not learn."
        )
    if bits and bits[0] > (1 - LEARNT) * RAW:
        return f"Text that nothing is known of takes as many bits: {NOT_YET}."
    return ""


def _by_few(h: History) -> str:
    """A sentence where so few tokens were validated that their mean loss tells little;
    else empty.

    The loss of a token varies about as much as it is large, so that the mean of n is
    known to 2 / sqrt(n) of itself.
    """
    part, batches = (
        h.number("validation tokens"),
        h.settings.get("train.final_eval_batches"),
    )
    read = (
        batches * h.settings["train.batch_tokens"] if isinstance(batches, int) else part
    )
    tokens = min(part, read)
    if tokens == 0 or 2 / math.sqrt(tokens) <= UNSURE:
        return ""
    return (
        f"That is of {tokens:,} tokens only, which tell it to about"
        f" ±{2 / math.sqrt(tokens):.0%}: too few to judge by; give the validation part"
        " more text (data.val_fraction)."
    )


def _bits(h: History) -> str:
    """The same per byte of text, and what else is known to predict text."""
    bits, packed = (
        finite(h.line(f"val/{key}"))[1][-1:]
        for key in ("bits_per_byte", "xz_bits_per_byte")
    )
    if not bits:
        return ""
    beside = (
        " and the compressor xz, which has not read the training text, needs"
        f" {packed[0]:.2f}"
        if packed
        else ""
    )
    return f": {bits[0]:.2f} bits for a byte of it, where raw text has {RAW}{beside}"


def _course(validation: list[tuple[int, float]], begin: int) -> str:
    """How the validation loss went in about the last quarter of the run, which began
    after step `begin`.
    """
    end, value = validation[-1]
    steps = end - begin
    before = [
        (step, y)
        for step, y in validation
        if begin + steps / 2 <= step <= begin + 0.75 * steps
    ]
    if not before:
        return ""
    step, earlier = before[-1]
    fell = 1 - value / earlier
    if fell > LEVEL:
        return (
            f"\nSince step {step:,} it still fell by {fell:.1%}: a longer run may come"
            " further."
        )
    return (
        f"\nSince step {step:,} it"
        f" {f'rose by {-fell:.1%}' if fell < -LEVEL else 'was level'}."
    )


def _apart(h: History, value: float, last: float) -> str:
    """What the training loss is below the validation loss by, and what of that can be
    memory.
    """
    share = 1 - last / value
    if share < APART:
        return ""
    text = f", {share:.0%} below the loss on text it never saw"
    if not h.epochs:
        return text
    heart = (
        "part of it may be known by heart"
        if h.epochs >= REREAD
        else "which is hardly by heart: the texts differ"
    )
    return f"{text}. It was read {h.epochs:.1f} times, {heart}"


def _elsewhere(h: History, step: int) -> str:
    """What the weights of that step come to in other precisions, where that was
    evaluated.
    """
    if h.evaluation is None or h.evaluation.step != step:
        return ""
    own, others = (
        h.evaluation.losses[AS_TRAINED],
        {k: v for k, v in h.evaluation.losses.items() if k != AS_TRAINED},
    )
    listed = ", ".join(
        f"{loss:.4f} in {name} ({loss / own - 1:+.2%})" for name, loss in others.items()
    )
    what = (
        f"On {h.evaluation.tokens:,} tokens of that text the loss of the same weights"
        f" is {own:.4f} as trained, {listed}"
    )
    return f"\n{what}: what the precision costs in use, not in training."


def healthy(h: History) -> Answer:
    """The answer from the events, the watchdog's counts and the numerics."""
    question, last = "Is it healthy?", h.rows[-1]
    skipped, rollbacks = (
        int(last.get("watchdog/skipped", 0)),
        int(last.get("watchdog/rollbacks", 0)),
    )
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
    lost, numerics = _lost(h)
    stopped = [text for text in texts if text.startswith("stopped")]
    if stopped:
        return Answer(
            question,
            BAD,
            f"The watchdog stopped it: {stopped[-1].removeprefix('stopped: ')}.",
        )
    if not listed and not h.looks and is_narrow(h.settings):
        return Answer(
            question,
            UNRATED,
            f"No step was skipped, nothing rolled back, no spike, no stall. {UNSEEN}",
        )
    if not listed:
        return Answer(
            question,
            lost,
            f"No step was skipped, nothing rolled back, no spike, no stall.{numerics}",
        )
    grade = BAD if skipped > 0.01 * len(h.rows) or lost == BAD else FAIR
    return Answer(
        question,
        grade,
        f"In {len(h.rows):,} steps: {listed}; see the events below.{numerics}",
    )


def is_narrow(settings: Mapping[str, Any]) -> bool:
    """Return whether any format of a run, by its dotted settings, has less range or
    fewer digits than FP32.
    """
    formats = (settings.get(f"precision.{key}") for key in FORMATS)
    return any(form not in (None, "fp32") for form in formats)


class Loss(NamedTuple):
    """What a narrow format takes from a tensor.

    Attributes:
      size: how bad, for the grade.
      share: of the tensor's values.
      tensor: its class and name, in words.
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
    """The tensor that lost most of each class, among those that are cast to eight bits.

    What underflowed was at most half the format's smallest number, so its RMS is at
    most sqrt(share) times that: as a share of the tensor's own RMS, and so of what a
    product of it loses, little where only the smallest of many values are lost, as of
    GELU's outputs. Nothing is known where the share is an upper bound itself, under
    scales that the tensor does not have (`numerics`).

    Args:
      figures: `numerics/CLASS/LAYER/FIGURE`.
      settings: of the run, by dotted keys.
      wide: paths of the linear layers that are not cast, those of stacks as
          `h.*.mlp.c_fc`.
      figure: what counts: `underflow` or `saturated`.
    """
    underflow = figure == "underflow"
    method = METHODS.get(settings.get("precision.scaling", ""))
    # what is counted is a bound, not what was lost
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
        known = underflow and rms > 0
        size = (
            min(1.0, math.sqrt(share) * form.min_subnormal / 2 / rms)
            if known
            else share
        )
        worst[kind] = max(
            worst.get(kind, Loss(-1.0, 0.0, "")), Loss(size, share, tensor)
        )
    return worst


def _cast(
    kind: str, name: str, settings: Mapping[str, Any], wide: Sequence[str]
) -> tuple[str, FloatFormat] | None:
    """A tensor in words, and the format that it is cast to; None: it is not, or that is
    not known.
    """
    key, suffix, words = NARROW.get(kind, ("", "", ""))
    form = settings.get(f"precision.{key}")
    if (
        form is None
        or settings.get("precision.forward") is None
        or not name.endswith(suffix)
    ):
        return None
    layer = name.removesuffix(suffix)
    linear = layer.rpartition(".")[2].startswith("c_") and not any(
        fnmatchcase(layer, path) for path in wide
    )
    return (f"{words} {layer}", FloatFormat.parse(form)) if linear else None


def _lost(h: History) -> tuple[str, str]:
    """What eight bits lost where they lose most, when it was last looked at: the grade,
    and a line for each kind.
    """
    grades, text = [GOOD], ""
    figures = h.looks[-1][1] if h.looks else {}
    for figure, (fair, bad), verb in (
        ("saturated", SATURATED, "Cut off"),
        ("underflow", LOST, "Rounded to zero"),
    ):
        if found := losses(figures, h.settings, h.wide_layers, figure).values():
            worst = max(found)
            grades.append(
                BAD if worst.size >= bad else FAIR if worst.size >= fair else GOOD
            )
            how = "harmless below" if grades[-1] == GOOD else "too much from"
            at_most = f"at most {worst.size:.2%} of their RMS"
            what = (
                f"{worst.share:.1%} of the values" if figure == "saturated" else at_most
            )
            text += (
                f"\n{verb} by the narrow format, where it was most at the last look:"
                f" {what}, {worst.tensor}"
            )
            text += f" ({how} {fair:.0%})."
    return max(grades, key=(GOOD, FAIR, BAD).index), text


def fast(h: History) -> Answer:
    """The answer from throughput, its course, the time spent waiting for data, and what
    the devices can do if known.
    """
    question = "Is it fast?"
    _, speeds = finite(h.line("perf/tokens_per_s"))
    if not speeds:
        return Answer(question, FAIR, "No throughput was recorded.")
    usual, tenth = statistics.median(speeds), max(1, len(speeds) // 10)
    late = statistics.median(speeds[-tenth:])
    step_ms = statistics.median(h.line("perf/step_ms").ys)
    waited = statistics.median(h.line("perf/data_ms").ys) / step_ms
    _, shares = finite(h.line("perf/mfu"))
    use = (
        f", {statistics.median(shares):.1%} of what the devices can do"
        if shares
        else ""
    )
    text = (
        f"{short(usual)} tokens/s, {step_ms:,.1f} ms a step{use}; {waited:.1%} of it"
        " waiting for data."
    )
    text += f"\nIts steps took {timedelta(seconds=round(_seconds(h)))} (h:mm:ss)."
    if waited > WAITING:
        return Answer(question, FAIR, f"{text}\nThe data hold it up.")
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
        question, UNRATED, f"{text}\nWhat this device could do at most is not known."
    )


def _seconds(h: History) -> float:
    """The seconds of all steps; those of a row are the ones since the row before."""
    line = h.line("perf/step_ms")
    pairs = zip(line.ys, line.xs, [h.rows[0]["step"], *line.xs], strict=False)
    return math.fsum(
        ms / 1e3 * (step - before) for ms, step, before in pairs if math.isfinite(ms)
    )


def _slow_steps(h: History, limit: float) -> str:
    """How many steps were below so many tokens/s, and how many of them while a
    checkpoint was written.
    """
    line = h.line("perf/tokens_per_s")
    slow = [
        int(step) for step, speed in zip(line.xs, line.ys, strict=True) if speed < limit
    ]
    if not slow:
        return ""
    every = h.settings.get("checkpoint.every") or 0
    saving = (
        sum(
            0 < step - every * ((step - 1) // every) <= SAVING and step > every
            for step in slow
        )
        if every
        else 0
    )
    beside = (
        f", {saving} of them while a checkpoint was being written" if saving else ""
    )
    return (
        f"; of {len(line.xs):,} timed steps {len(slow):,} fell below {SLOWER:.0%} of"
        f" that speed{beside}"
    )
