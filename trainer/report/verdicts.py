"""Verdicts on a run: is it learning, healthy, fast? Each has a grade and sentences."""

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from scalify_core.numerics.formats import FloatFormat
from trainer.observe.display import short
from trainer.precision.methods import METHODS
from trainer.report.run_records import AS_TRAINED, RunRecords

GOOD, FAIR, BAD, UNRATED = "good", "fair", "bad", "unrated"
GRADE_LABELS = {GOOD: "✓ yes", FAIR: "~ look closer", BAD: "✗ no", UNRATED: "not rated"}
MAX_LOSS_RISE = 0.02  # relative to the lowest validation loss, or the loss at the start
MIN_LOSS_DROP = 0.02  # relative to the first training loss, or the loss of guessing
PLATEAU = 0.005  # a smaller relative change of the validation loss counts as none
MEMORIZING_EPOCHS = 1.5  # fewer can hardly memorize the training text
BARELY_LEARNS = "it has hardly begun, or does not learn"
RAW_BITS = 8  # per byte of uncompressed text
MAX_ERROR = 0.05  # two standard errors of the validation loss, as a share of it
MAX_GENERALIZATION_GAP = 0.05  # share by which the training loss is below validation
MIN_SPEED = 0.8  # share of the median throughput
STEPS_OF_SAVE = 5  # a background save slows about this number of steps
MAX_DATA_WAIT = 0.1  # share of a step
# A slow machine is no fault of the run.
LOAD_NOTE = (
    " Other load on the machine may be the cause; it is not recorded, so this is not"
    " rated."
)
MIN_MFU = 0.1
# Classes of tensors that are cast to FP8: the key of `precision` for the format, the
# suffix of their names, and their description.
FP8_TENSORS = {
    "weights": ("forward", ".kernel", "the weights of"),
    "activations": ("forward", ".in", "the inputs of"),
    "activation_gradients": ("backward", ".out", "the gradients of the outputs of"),
    "weight_gradients": ("weight_grad", ".kernel", "the weight gradients of"),
}
PRECISION_KEYS = (
    "compute",
    "forward",
    "backward",
    "weights",
    "weight_grad",
    "mu",
    "nu",
)
NO_NUMERICS = (
    "Saturation and underflow are unknown, because no numerics were recorded. Set"
    " metrics.numerics_every=250 to record them."
)
# Limits of the grades FAIR and BAD: the share of a tensor's values that saturated, and
# the RMS of the values that were rounded to zero, as a share of the tensor's RMS.
# A share of values that underflow says little: a fifth of GELU's outputs round to zero
# in E4M3, and are 0.03% of their tensor's RMS.
SATURATION_LIMITS = (0.01, 0.1)
UNDERFLOW_LIMITS = (0.01, 0.1)
# A training loss is a jump if it exceeds the median of the JUMP_WINDOW losses before it
# by more than JUMP of that median, and by more than JUMP_SIGMAS robust standard
# deviations. The watchdog judges only after `watchdog.spike_window` losses.
JUMP, JUMP_SIGMAS, JUMP_WINDOW = 0.2, 8.0, 8

EVENT_NAMES = {  # of the watchdog's events, by how they start
    "stalled": "stalled",
    "no progress": "ended because it hung",
    "not stopped within": "ended because it did not stop",
}


class Verdict(NamedTuple):
    """A grade, and the reason, most important line first."""

    grade: str
    text: str


def learning(run: RunRecords) -> Verdict:
    """Judge by the validation losses, or without them by the training losses."""
    validation = run.points("val/loss")
    all_losses = run.line("train/loss").ys
    losses = list(filter(math.isfinite, all_losses))
    # Single NaNs may be steps that the watchdog skipped.
    last_tenth = all_losses[-max(1, len(all_losses) // 10) :]
    if sum(map(math.isfinite, last_tenth)) <= len(last_tenth) / 2:
        return Verdict(
            BAD,
            f"Most of the last {len(last_tenth):,} training losses are not finite.",
        )
    # `points` leaves NaN out, so an earlier, finite loss would stand for the last one.
    if not all(map(math.isfinite, run.line("val/loss").ys[-1:])):
        return Verdict(BAD, "The last validation loss is not finite.")
    if len(losses) < 2:
        return Verdict(FAIR, "Too few steps to tell.")
    # Losses of single steps vary too much to be compared.
    tenth = max(1, len(losses) // 10)
    # A run that starts from trained weights has no high first loss to fall from.
    first_losses = losses[:tenth] if run.started_from else losses[:1]
    last_losses = losses[-tenth:]
    first, last = statistics.fmean(first_losses), statistics.fmean(last_losses)
    training = (
        f"The loss on its training text went from {first:.3f} nats a token"
        f"{_first_loss_context(run, len(first_losses))} to {last:.3f}"
    )
    grade, reason = _training_grade(run, first_losses, last_losses)
    if not validation:
        return Verdict(grade, f"{training}. There was no validation.{reason}")
    val_step, val_loss = validation[-1]
    text = f"On unseen text the loss is {val_loss:.3f} nats a token"
    text += f"{_bits_per_byte(run)}."
    evaluation = _in_other_precisions(run, val_step)
    # Trained weights may know their training text better than any unseen text, so their
    # first loss is no bound for the validation.
    if grade == BAD or (val_loss >= first and not run.started_from):
        return Verdict(
            BAD,
            f"{text} That is no better than at the start.\n{training}.{evaluation}",
        )
    if grade == FAIR:
        return Verdict(FAIR, f"{text}\n{training}.{reason}{evaluation}")
    # Before the trend: a course of losses that mean nothing must not be praised.
    if doubt := _near_guessing(run, val_loss) or _too_few_tokens(run, val_step):
        return Verdict(FAIR, f"{text} {doubt}\n{training}.{evaluation}")
    if rise := _rise_of_validation(run, val_step):
        # Only a training loss below the best validation loss points at memorizing; both
        # rise where training is unstable.
        best = min(loss for _, loss in run.comparable_validations)
        overfitting = " It memorizes its training text." if last < best else ""
        return Verdict(FAIR, f"{text} {rise}.\n{training}.{overfitting}{evaluation}")
    # A fork's first row is not step 1.
    trend = _trend(run.comparable_validations, run.rows[0]["step"] - 1)
    gap = _generalization_gap(run, val_loss, last)
    return Verdict(GOOD, f"{text}{trend}\n{training}{gap}.{evaluation}")


def _rise_of_validation(run: RunRecords, last_step: int) -> str:
    """Return a clause about a validation loss that was clearly lower before.

    Empty: it was not. `last_step`: the step of the last validation, which may have read
    another text than those before.
    """
    # The final validation often reads more text than those before; text that is harder
    # would look like a rise.
    best_step, best = min(run.comparable_validations, key=lambda pair: pair[1])
    newest_step, newest = run.comparable_validations[-1]
    if newest <= best * (1 + MAX_LOSS_RISE):
        return ""
    # Else the loss above this sentence is of more text, and not the one that rose.
    if newest_step == last_step:
        return f"It was better, {best:.3f}, after step {best_step:,}"
    return (
        f"On its first train.eval_batches the loss was better, {best:.3f},"
        f" after step {best_step:,} than after step {newest_step:,}, {newest:.3f}"
    )


def _training_grade(
    run: RunRecords, first_losses: Sequence[float], last_losses: Sequence[float]
) -> tuple[str, str]:
    """Return a grade of the training loss, and a sentence if it is not good.

    A run that starts from trained weights may stay at its first loss, which is good. It
    is called worse only if the rise exceeds two standard errors, because losses of
    single steps vary.
    """
    first, last = statistics.fmean(first_losses), statistics.fmean(last_losses)
    # Fine-tuning may start near its best loss, so a fall of 2% cannot be asked for.
    if run.started_from:
        # Both means are uncertain, and independently so.
        error = math.hypot(
            *(
                statistics.stdev(losses) / math.sqrt(len(losses))
                for losses in (first_losses, last_losses)
                if len(losses) > 1
            )
        )
        has_risen = last > first * (1 + MAX_LOSS_RISE) and last - first > 2 * error
        # One loss has no standard error to compare the rise with.
        if has_risen and len(first_losses) > 1:
            rise = f"{last / first - 1:.1%}"
            return FAIR, f" That is worse than at its start, by {rise}."
        return GOOD, ""
    if last >= first:
        return BAD, ""
    # A model that predicts only how frequent tokens are falls further than this.
    if last > first * (1 - MIN_LOSS_DROP):
        drop = f"{MIN_LOSS_DROP:.0%}"
        return FAIR, f" That is a fall of less than {drop}: {BARELY_LEARNS}."
    return GOOD, ""


def _first_loss_context(run: RunRecords, steps: int) -> str:
    """Return a parenthesis about the first loss, which is the mean over `steps` steps.

    It names the weights that the run started from, or the loss of blind guessing.
    """
    if run.started_from:
        mean = f"mean of the first {steps:,} steps, " if steps > 1 else ""
        return f" ({mean}{run.started_from})"
    ids = run.number("vocabulary")
    if ids:
        return f" (blind guessing among {ids:,} tokens: {math.log(ids):.3f})"
    return ""


def _near_guessing(run: RunRecords, val_loss: float) -> str:
    """Return a sentence if the validation loss is hardly below that of guessing."""
    ids = run.number("vocabulary")
    bits = run.values("val/bits_per_byte")[-1:]
    # Zero ids are unknown, and log(0) raises; the loss of one id is 0 in any case.
    if ids > 1 and val_loss > (1 - MIN_LOSS_DROP) * math.log(ids):
        return (
            f"Blind guessing among {ids:,} tokens comes to {math.log(ids):.3f}:"
            f" {BARELY_LEARNS}."
        )
    # Where a vocabulary does not fit the text, a token holds about a byte. A loss below
    # that of guessing may then still exceed raw text.
    if bits and bits[0] > (1 - MIN_LOSS_DROP) * RAW_BITS:
        return f"Uncompressed text takes {RAW_BITS} bits per byte: {BARELY_LEARNS}."
    return ""


def _too_few_tokens(run: RunRecords, step: int) -> str:
    """Return a sentence if the validation after a step read too few tokens.

    The standard deviation of a token's loss is about as large as its mean. So the mean
    over n tokens has a relative error of about 2 / sqrt(n), two standard errors.
    """
    tokens = run.number("validation tokens")
    # Runs of earlier versions may not tell what a validation read.
    tokens = min(tokens, run.validated_tokens(step) or tokens)
    if tokens == 0 or 2 / math.sqrt(tokens) <= MAX_ERROR:
        return ""
    return (
        f"It is the mean of {tokens:,} tokens only, which is accurate to about"
        f" ±{2 / math.sqrt(tokens):.0%}: too few to judge by; increase"
        " data.val_fraction."
    )


def _bits_per_byte(run: RunRecords) -> str:
    """Return the loss in bits per byte of text, compared with a compressor's."""
    bits, xz_bits = (
        run.values(f"val/{key}")[-1:] for key in ("bits_per_byte", "xz_bits_per_byte")
    )
    if not bits:
        return ""
    compressor = ""
    # xz starts from nothing, so a trained model should need less. It gives people who
    # do not know nats a scale.
    if xz_bits:
        compressor = (
            " and the compressor xz, which has not read the training text, needs"
            f" {xz_bits[0]:.2f}"
        )
    return f": {bits[0]:.2f} bits per byte, where raw text has {RAW_BITS}{compressor}"


def _trend(validation: list[tuple[int, float]], start: int) -> str:
    """Return a sentence about the validation loss in the last quarter of the run.

    Args:
      validation: step and loss of each validation.
      start: the step before the run's first one.
    """
    end, last_loss = validation[-1]
    steps = end - start
    third_quarter = [
        (step, loss)
        for step, loss in validation
        # The change is thus over at least a quarter of the run.
        if start + steps / 2 <= step <= start + 0.75 * steps
    ]
    if not third_quarter:
        return ""
    step, earlier_loss = third_quarter[-1]
    drop = 1 - last_loss / earlier_loss
    if drop > PLATEAU:
        return (
            f"\nSince step {step:,} it still fell by {drop:.1%}: a longer run may come"
            " further."
        )
    change = f"rose by {-drop:.1%}" if drop < -PLATEAU else "was level"
    return f"\nSince step {step:,} it {change}."


def _generalization_gap(run: RunRecords, val_loss: float, training_loss: float) -> str:
    """Return the gap between training and validation loss, and a possible reason."""
    share = 1 - training_loss / val_loss
    # The two losses are of different texts, so a small gap means nothing.
    if share < MAX_GENERALIZATION_GAP:
        return ""
    text = f", {share:.0%} below the loss on unseen text"
    if not run.epochs:
        return text
    reason = "so it can hardly be memorized: the two texts differ in kind"
    if run.epochs >= MEMORIZING_EPOCHS:
        reason = "so part of it may be memorized"
    return f"{text}. The training text was read {run.epochs:.1f} times, {reason}"


def _in_other_precisions(run: RunRecords, step: int) -> str:
    """Return a line about the losses of a step's weights in other precisions."""
    # Training went on after an evaluation of earlier weights: its losses are no longer
    # the run's.
    if run.evaluation is None or run.evaluation.step != step:
        return ""
    as_trained = run.evaluation.losses[AS_TRAINED]
    listed = ", ".join(
        f"{loss:.4f} in {name} ({loss / as_trained - 1:+.2%})"
        for name, loss in run.evaluation.losses.items()
        if name != AS_TRAINED
    )
    return (
        f"\nOn {run.evaluation.tokens:,} tokens of that text the loss of the same"
        f" weights is {as_trained:.4f} as trained, {listed}: this is the cost of"
        " inference in that precision, not of training in it."
    )


def healthy(run: RunRecords) -> Verdict:
    """Judge by the events, the watchdog's counts and the numerics."""
    last = run.rows[-1]
    steps = last["step"]
    skipped = int(last.get("watchdog/skipped", 0))
    texts = [text for _, text in run.events]
    stopped = [text for text in texts if text.startswith("stopped")]
    # The watchdog's reason stands alone: counts of what led to it add nothing.
    if stopped:
        reason = stopped[-1].removeprefix("stopped: ")
        return Verdict(BAD, f"The watchdog stopped it: {reason}.")
    counts = {
        "skipped (not finite)": skipped,
        "rolled back": int(last.get("watchdog/rollbacks", 0)),
        "spiking": sum(": spike" in text for text in texts),
    }
    for start, name in EVENT_NAMES.items():
        counts[name] = sum(text.startswith(start) for text in texts)
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    # The watchdog's spikes are in the counts already.
    jump = "" if counts["spiking"] else _jumps(run)
    fp8_grade, numerics = _fp8_grade(run)
    if listed:
        # The watchdog counts from the first step of all, also before a fork.
        grade = BAD if skipped > 0.01 * steps or fp8_grade == BAD else FAIR
        return Verdict(
            grade,
            f"In {steps:,} steps: {listed}; see the events below. {jump}{numerics}",
        )
    no_spike = "" if jump else ", no spike"
    no_event = f"No step was skipped, nothing rolled back{no_spike}, no stall."
    if jump:
        grade = BAD if fp8_grade == BAD else FAIR
        return Verdict(grade, f"{no_event} {jump}{numerics}")
    # A run can look healthy while layers lose their gradients; only the numerics show
    # that.
    if not run.numerics and is_low_precision(run.settings):
        return Verdict(UNRATED, f"{no_event} {NO_NUMERICS}")
    return Verdict(fp8_grade, f"{no_event}{numerics}")


def _jumps(run: RunRecords) -> str:
    """Return a sentence about the jumps of the training loss; empty: there are none.

    Consecutive losses that are jumps count once.
    """
    points = run.points("train/loss")
    losses = [loss for _, loss in points]
    # The first two losses have too few before them.
    medians = [
        statistics.median(losses[max(0, i - JUMP_WINDOW) : i])
        for i in range(2, len(losses))
    ]
    rises = [y - median for y, median in zip(losses[2:], medians, strict=True)]
    if not rises:
        return ""
    # The median absolute deviation, scaled to the sigma of a normal distribution.
    sigma = 1.4826 * statistics.median(map(abs, rises))
    is_jump = [
        # Small models are noisy: deviations scale the bound. Smooth runs have tiny
        # ones, so that any ripple would count without JUMP.
        rise > max(JUMP * median, JUMP_SIGMAS * sigma)
        for rise, median in zip(rises, medians, strict=True)
    ]
    count = sum(
        # A jump that takes several steps to come back is one event.
        jumps and not jumped_before
        for jumps, jumped_before in zip(is_jump, [False, *is_jump], strict=False)
    )
    if not count:
        return ""
    i = max((i for i, jumps in enumerate(is_jump) if jumps), key=rises.__getitem__)
    largest = (
        f"from a median of {medians[i]:.3g} to {losses[i + 2]:.3g} in step"
        f" {points[i + 2][0]:,}"
    )
    if count == 1:
        return f"The training loss jumped {largest}."
    return f"The training loss jumped {count} times, at most {largest}."


def is_low_precision(settings: Mapping[str, Any]) -> bool:
    """Return whether any format of a run is narrower than FP32.

    `settings`: by dotted keys.
    """
    # Settings of earlier versions may lack keys: these are null here.
    formats = (settings.get(f"precision.{key}") for key in PRECISION_KEYS)
    return any(name not in (None, "fp32") for name in formats)


class QuantizationError(NamedTuple):
    """The error of casting a tensor to FP8.

    Attributes:
      severity: compared with SATURATION_LIMITS or UNDERFLOW_LIMITS.
      share: the affected share of the tensor's values.
      tensor: the tensor's class and name, in words.
    """

    severity: float
    share: float
    tensor: str


def quantization_errors(
    numerics: Mapping[str, float],
    settings: Mapping[str, Any],
    fp8_layers: Sequence[str],
    statistic: str,
) -> dict[str, QuantizationError]:
    """Return the worst error of each tensor class, among tensors that are cast to FP8.

    The severity of saturation is the share of saturated values. The severity of
    underflow is an upper bound of the RMS of the values that were rounded to zero, as a
    share of the tensor's RMS. Each such value was at most half the format's smallest
    number, so their RMS is at most sqrt(share) times that.

    Args:
      numerics: `numerics/CLASS/LAYER/STATISTIC`.
      settings: of the run, by dotted keys.
      fp8_layers: paths of the linear layers that are cast; `h.*.mlp.c_fc` for stacked
        layers.
      statistic: `underflow` or `saturated`.
    """
    is_underflow = statistic == "underflow"
    method = METHODS.get(settings.get("precision.scaling", ""))
    # Under these methods the recorded share is an upper bound, not a measurement.
    if is_underflow and method is not None and method.measures_scales:
        return {}
    worst: dict[str, QuantizationError] = {}
    for key, share in numerics.items():
        _, kind, name, key_statistic = key.split("/")
        cast = _fp8_cast(kind, name, settings, fp8_layers)
        # `not share > 0` leaves NaN out, too, which `max` cannot order.
        if key_statistic != statistic or cast is None or not share > 0:
            continue
        tensor, fp8 = cast
        rms = numerics.get(f"numerics/{kind}/{name}/rms", math.nan)
        severity = share
        # A missing RMS, or zero, gives no bound: the share stands for it.
        if is_underflow and rms > 0:
            severity = min(1.0, math.sqrt(share) * fp8.min_subnormal / 2 / rms)
        error = QuantizationError(severity, share, tensor)
        # Tuples compare by severity first.
        worst[kind] = max(worst.get(kind, error), error)
    return worst


def _fp8_cast(
    kind: str, name: str, settings: Mapping[str, Any], fp8_layers: Sequence[str]
) -> tuple[str, FloatFormat] | None:
    """Return a tensor's description and the format that it is cast to.

    Return None if the tensor is not cast, or if the run's settings are unknown.
    """
    key, suffix, description = FP8_TENSORS.get(kind, ("", "", ""))
    format_name = settings.get(f"precision.{key}")
    forward = settings.get("precision.forward")
    # FP16 weight gradients without FP8 matmuls are recorded, too, but nothing is cast
    # to FP8.
    if format_name is None or forward is None or not name.endswith(suffix):
        return None
    layer = name.removesuffix(suffix)
    # Sizing what is not cast with FP8's format has led to an underflow of 440% of the
    # RMS.
    if not any(fnmatchcase(layer, path) for path in fp8_layers):
        return None
    fine = settings.get("precision.backward_e4m3") or ()
    if key == "backward" and any(fnmatchcase(layer, path) for path in fine):
        format_name = "e4m3"
    return f"{description} {layer}", FloatFormat.parse(format_name)


def _fp8_grade(run: RunRecords) -> tuple[str, str]:
    """Return the grade of the last measured saturation and underflow, and lines."""
    grades = [GOOD]
    text = ""
    # The last measurement, because scales adapt: what was lost in the first steps is
    # over.
    numerics = run.numerics[-1][1] if run.numerics else {}
    for statistic, (fair, bad), verb in (
        ("saturated", SATURATION_LIMITS, "Saturated"),
        ("underflow", UNDERFLOW_LIMITS, "Rounded to zero"),
    ):
        errors = quantization_errors(numerics, run.settings, run.fp8_layers, statistic)
        if not errors:
            continue
        worst = max(errors.values())
        grade = GOOD
        if worst.severity >= fair:
            grade = FAIR
        if worst.severity >= bad:
            grade = BAD
        grades.append(grade)
        judgment = "harmless below" if grade == GOOD else "too much from"
        amount = f"at most {worst.severity:.2%} of that tensor's RMS"
        if statistic == "saturated":
            amount = f"{worst.share:.1%} of that tensor's values"
        text += (
            f"\n{verb} by the cast to FP8 (last measurement, worst tensor:"
            f" {worst.tensor}): {amount} ({judgment} {fair:.0%})."
        )
    return max(grades, key=(GOOD, FAIR, BAD).index), text


def fast(run: RunRecords) -> Verdict:
    """Judge by throughput and its trend, data waits, and MFU if it is known."""
    speeds = run.values("perf/tokens_per_s")
    if not speeds:
        return Verdict(FAIR, "No throughput was recorded.")
    median = statistics.median(speeds)
    # The last tenth alone: a slow start is no trend.
    final_speed = statistics.median(speeds[-max(1, len(speeds) // 10) :])
    step_ms = statistics.median(run.line("perf/step_ms").ys)
    data_wait = statistics.median(run.line("perf/data_ms").ys) / step_ms
    mfus = run.values("perf/mfu")
    mfu = ""
    if mfus:
        mfu = f", {statistics.median(mfus):.1%} of the devices' peak"
    text = (
        f"{short(median)} tokens/s, {step_ms:,.1f} ms a step{mfu}; {data_wait:.1%} of"
        " it waiting for data."
    )
    duration = timedelta(seconds=round(3600 * run.step_axes.hours[-1]))
    text += f"\nIts steps took {duration} (h:mm:ss)."
    # First, as it explains a low speed.
    if data_wait > MAX_DATA_WAIT:
        return Verdict(FAIR, f"{text}\nWaiting for data slows it down.")
    if final_speed < MIN_SPEED * median:
        return Verdict(
            UNRATED,
            f"{text}\nIt slowed down: {short(final_speed)} tokens/s at the end."
            f"{LOAD_NOTE}",
        )
    # A tenth of the steps: saves slow a few, and are told below.
    if (slow := sorted(speeds)[len(speeds) // 10]) < MIN_SPEED * median:
        unsteady = (
            f"It is unsteady: the slowest tenth of its steps ran at {short(slow)}"
            " tokens/s or less."
        )
        return Verdict(UNRATED, f"{text}\n{unsteady}{LOAD_NOTE}")
    # After steadiness: MFU of a machine under other load would blame the model's size.
    if mfus and statistics.median(mfus) < MIN_MFU:
        return Verdict(
            FAIR,
            f"{text}\nThat is low; a larger batch or model uses more of it.",
        )
    text += f"\nSteady to the end{_slow_steps(run, MIN_SPEED * median)}."
    if mfus:
        return Verdict(GOOD, text)
    return Verdict(UNRATED, f"{text}\nThe peak rate of this device is not known.")


def _slow_steps(run: RunRecords, limit: float) -> str:
    """Return how many steps fell below `limit` tokens/s, and how many in a save."""
    line = run.line("perf/tokens_per_s")
    slow = [
        int(step) for step, speed in zip(line.xs, line.ys, strict=True) if speed < limit
    ]
    if not slow:
        return ""
    # 0: a checkpoint at the end alone, which slows no step.
    every = run.settings.get("checkpoint.every")
    during_save = 0
    if every:
        for step in slow:
            # Step `every` itself is still before its save, so `step - 1` is divided.
            since_save = step - every * ((step - 1) // every)
            during_save += step > every and 0 < since_save <= STEPS_OF_SAVE
    saves = ""
    if during_save:
        saves = f", {during_save} of them while a checkpoint was being written"
    return (
        f"; of {len(line.xs):,} timed steps {len(slow):,} fell below {MIN_SPEED:.0%} of"
        f" that speed{saves}"
    )
