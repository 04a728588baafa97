"""Verdicts on a run: does it learn, is it healthy and fast, what do eight bits lose?"""

import math

import pytest
from run_records import FALLING, FP8, rows, run_records, tensor

from trainer.report.verdicts import BAD, FAIR, GOOD, UNRATED, fast, healthy, learning


def check(verdict, grade, says):
    assert (verdict.grade, says in verdict.text) == (grade, True), verdict


NEARLY_LEVEL = [5.5 - 1e-6 * i for i in range(100)]


@pytest.mark.parametrize(
    ("losses", "val", "grade", "says"),
    [
        (FALLING, {50: 3.5, 100: 1.6}, GOOD, "Since step 50 it still fell by 54.3%"),
        (FALLING, {50: 1.6, 75: 1.605, 100: 1.6}, GOOD, "Since step 75 it was level."),
        (FALLING, {75: 1.6, 100: 1.62}, GOOD, "Since step 75 it rose by 1.2%."),
        (FALLING, {100: 2.0}, GOOD, "to 1.720, 14% below the loss on unseen text."),
        (FALLING, {50: 1.5, 100: 1.6}, FAIR, "It was better, 1.500, after step 50"),
        (
            [*FALLING[:80], *[0.9] * 20],
            {50: 1.5, 100: 1.6},
            FAIR,
            "It memorizes its training text.",
        ),
        (FALLING[::-1], {100: 6.0}, BAD, "no better than at the start"),
        (NEARLY_LEVEL, {100: 5.49}, FAIR, "a fall of less than 2%"),
        (FALLING[:20] + [math.nan] * 80, {20: 4.7}, BAD, "last 10 training losses are"),
        ([5.0, 4.0, 3.0], {}, GOOD, "from 5.000 nats a token to 3.000"),
        (FALLING, {100: math.inf}, BAD, "The last validation loss is not finite"),
    ],
)
def test_learning_is_judged_by_the_course_of_the_losses(losses, val, grade, says):
    check(learning(run_records(rows(losses, val))), grade, says)


LEVEL = [2.0 - 0.05 * (-1) ** i for i in range(100)]


@pytest.mark.parametrize(
    ("losses", "val", "grade", "says"),
    [
        (LEVEL, {100: 2.1}, GOOD, "(mean of the first 10 steps, {} runs/a after step"),
        (
            [*LEVEL[:50], *(loss + 0.1 for loss in LEVEL[:50])],
            {100: 2.1},
            FAIR,
            "worse than at its start, by 5.0%",
        ),
        # of single steps, which vary as much
        ([2.0, 2.2] * 10 + [2.1, 2.3], {}, GOOD, "no validation."),
    ],
)
def test_a_run_from_weights_is_judged_by_their_loss(losses, val, grade, says):
    for fact in ("forked from", "weights from"):
        run = run_records(rows(losses, val), **{fact: "runs/a after step 900"})
        check(learning(run), grade, says.format(fact))
    assert learning(run_records(rows(losses, val))).grade != GOOD


def validated(val, tokens):
    """Return the records of validations that read so many tokens."""
    logged = rows(FALLING, val)
    for step, count in tokens.items():
        logged[step - 1]["val/tokens"] = count
    return run_records(logged)


def test_a_validation_of_more_tokens_is_not_compared_with_those_before():
    """The text of the final validation may be harder, or easier."""
    val = {50: 1.5, 75: 1.49, 100: 1.6}
    answer = learning(validated(val, {50: 8, 75: 8, 100: 72}))
    check(answer, GOOD, "Since step 50 it still fell by 0.7%")  # until step 75
    val = {25: 1.4, 50: 1.5, 100: 1.3}
    answer = learning(validated(val, {25: 8, 50: 8, 100: 72}))
    check(answer, FAIR, "better, 1.400, after step 25 than after step 50, 1.500.")
    # A run that was trained longer has the final validation of its first end.
    longer = {30: 1.6, 50: 1.2, 75: 1.55, 100: 1.3}
    run = validated(longer, {30: 8, 50: 72, 75: 8, 100: 72})
    assert run.comparable_validations == [(30, 1.6), (75, 1.55)]


@pytest.mark.parametrize(
    ("event", "counts", "grade", "says"),
    [
        ("", {}, GOOD, "No step was skipped"),
        ("step 5 skipped (loss nan)", {"skipped": 1}, FAIR, "1 skipped (not finite)"),
        ("step 5 skipped", {"skipped": 9}, BAD, "9 skipped (not finite)"),
        ("x; back to the state after step 5", {"rollbacks": 1}, FAIR, "1 rolled back"),
        ("stopped: step 9: 3 steps", {}, BAD, "The watchdog stopped it: step 9"),
        ("no progress for 1800 s; ended", {}, FAIR, "1 ended because it hung"),
        ("not stopped within 300 s of the signal", {}, FAIR, "it did not stop"),
    ],
)
def test_health_is_judged_by_what_happened(event, counts, grade, says):
    more = {f"watchdog/{name}": count for name, count in counts.items()}
    losses = [5.5 - 0.02 * i for i in range(200)]
    check(
        healthy(run_records(rows(losses, **more), [(9, event)] * bool(event))),
        grade,
        says,
    )


def test_a_jump_of_the_loss_is_told_and_noise_is_none():
    losses = [3.0 - 0.01 * i + 0.02 * (i % 3) for i in range(60)]
    check(healthy(run_records(rows(losses))), GOOD, "no spike")
    losses[13:15] = [10.3, 4.8]
    jump = "jumped from a median of 2.94 to 10.3 in step 14"
    check(healthy(run_records(rows(losses))), FAIR, jump)


def test_narrow_formats_without_numerics_are_not_called_healthy():
    for config, numerics, grade, says in (
        (FP8, None, UNRATED, "Set metrics.numerics_every=250"),
        ("precision: {compute: fp32, mu: fp32}", None, GOOD, "no stall."),
        (FP8, tensor(saturated=0.0), GOOD, "no stall."),
    ):
        run = run_records(rows(FALLING), config=config, numerics=numerics)
        check(healthy(run), grade, says)


@pytest.mark.parametrize(
    ("value", "bits", "facts", "grade", "says"),
    [
        (5.498, 7.97, {"vocabulary": "256"}, FAIR, "tokens comes to 5.545: it has"),
        (3.0, 7.9, {}, FAIR, "Uncompressed text takes 8 bits per byte: it has hardly"),
        (3.0, 4.3, {"validation tokens": "1,599"}, FAIR, "mean of 1,599 tokens only"),
        (3.0, 4.3, {"validation tokens": "1,601"}, GOOD, "3.000 nats"),
        # above the training loss; 100 steps of 100 tokens
        (4.8, 6.0, {"training tokens": "5,000"}, GOOD, "2.0 times, so part of it may"),
        (4.8, 6.0, {"training tokens": "10,000"}, GOOD, "1.0 times, so it can hardly"),
    ],
)
def test_a_loss_near_guessing_or_of_few_tokens_is_doubted(
    value, bits, facts, grade, says
):
    logged = rows([12.0 - 0.08 * i for i in range(100)], {100: value})
    logged[-1]["val/bits_per_byte"] = bits
    check(learning(run_records(logged, **facts)), grade, says)


MORE_THAN = "of that tensor's RMS (too much from 1%)"


@pytest.mark.parametrize(
    ("figures", "config", "grade", "says"),
    [
        (tensor(saturated=0.02), FP8, FAIR, "(too much from 1%)"),
        (tensor(saturated=0.2), FP8, BAD, "20.0% of that tensor's values"),
        # A lost value is at most half of E4M3's smallest number, 2^-9, in a quarter of
        # the values: 0.5 x 2^-10 / rms.
        (tensor(underflow=0.25, rms=1.0), FP8, GOOD, "c_proj): at most 0.05% of that"),
        (tensor(underflow=0.25, rms=0.01), FP8, FAIR, MORE_THAN),
        (tensor(underflow=0.25, rms=0.001), FP8, BAD, "at most 48.83%"),
        # E5M2 has numbers down to 2^-16, FP16 to 2^-24.
        (
            tensor(
                "activation_gradients", "h.1.mlp.c_fc.out", underflow=0.25, rms=0.001
            ),
            FP8,
            GOOD,
            "at most 0.38% of that",
        ),
        # the worst tensor
        (
            tensor(underflow=0.25, rms=1.0)
            | tensor(layer="h.0.attn.c_attn.in", underflow=0.1, rms=0.01),
            FP8,
            FAIR,
            "the inputs of h.0.attn.c_attn): at",
        ),
        # E4M3 flushes values that E5M2 keeps.
        (
            tensor("activation_gradients", "h.0.mlp.c_fc.out", underflow=0.5, rms=0.01),
            FP8.replace("backward:", "backward_e4m3: ['h.0.*'], backward:"),
            FAIR,
            "the gradients of the outputs of h.0.mlp.c_fc",
        ),
        # a bound
        (
            tensor(underflow=0.6, rms=1e-4),
            FP8.replace("propagate", "delayed"),
            GOOD,
            "no stall.",
        ),
    ],
)
def test_losses_of_eight_bits_are_judged_by_their_share_of_the_tensor(
    figures, config, grade, says
):
    run = run_records(rows(FALLING), config=config, numerics=figures)
    check(healthy(run), grade, says)


def test_tensors_that_are_not_cast_to_eight_bits_are_not_judged():
    for kind, layer, config in (
        ("weight_gradients", "wte.embedding", FP8),
        ("weight_gradients", "h.0.attn.c_attn.bias", FP8),
        ("activations", "h.1.mlp.c_proj.in", ""),
        ("activations", "h.1.mlp.c_proj.in", FP8.replace("forward: e4m3", "x: e4m3")),
    ):
        figures = tensor(kind, layer, underflow=0.9, saturated=0.9, rms=1e-6)
        run = run_records(rows(FALLING), config=config, numerics=figures)
        check(healthy(run), GOOD, "no stall.")


def steady(i):
    return 1000.0


@pytest.mark.parametrize(
    ("speed", "more", "grade", "says"),
    [
        (
            steady,
            {},
            UNRATED,
            "0:00:10 (h:mm:ss).\nSteady to the end.",
        ),
        (
            lambda i: 500.0 if i in (13, 31, 35, 36) else 1000.0,
            {},
            UNRATED,
            "of 100 timed steps 4 fell below 80% of that speed, 2 of",
        ),
        (
            lambda i: 1000.0 if i < 80 else 500.0,
            {},
            UNRATED,
            "500 tokens/s at the end.",
        ),
        (steady, {"perf/data_ms": 50.0}, FAIR, "Waiting for data slows it down."),
        (steady, {"perf/mfu": 0.4}, GOOD, "40.0% of the devices' peak"),
        (steady, {"perf/mfu": 0.005}, FAIR, "0.5% of the devices' peak"),
        (lambda i: 1e4 if i % 3 else 100.0, {}, UNRATED, "at 100 tokens/s or less"),
    ],
)
def test_speed_is_judged_by_its_course_and_the_peak(speed, more, grade, says):
    logged = rows(FALLING, speed=speed, **more)
    check(fast(run_records(logged, config="checkpoint: {every: 30}")), grade, says)


@pytest.mark.parametrize(
    ("text", "number"), [("9" * 5000, 0), ("1,024", 1024), ("", 0)]
)
def test_a_fact_that_is_no_number_of_a_run_is_unknown(text, number):
    assert run_records(rows(FALLING), vocabulary=text).number("vocabulary") == number
