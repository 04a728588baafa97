"""What is said of a run: whether it learns, is healthy and fast, and what eight bits
lose."""

import math

import pytest
from histories import FALLING, FP8, history, rows, tensor

from trainer.report.history import History, SavedEvaluation
from trainer.report.verdicts import BAD, FAIR, GOOD, UNRATED, fast, healthy, learning

SMOOTH = [5.5 - 0.02 * i for i in range(200)]


@pytest.mark.parametrize(
    ("losses", "val", "grade", "says"),
    [
        (FALLING, {50: 3.5, 100: 1.6}, GOOD, "Since step 50 it still fell by 54.3%"),
        (FALLING, {50: 1.6, 75: 1.605, 100: 1.6}, GOOD, "Since step 75 it was level."),
        (
            FALLING,
            {50: 1.7, 75: 1.6, 100: 1.62},
            GOOD,
            "Since step 75 it rose by 1.2%.",
        ),
        # too long ago to be the end's course
        (FALLING, {10: 3.5, 100: 1.6}, GOOD, "1.600 nats a token.\nThe loss on"),
        (
            FALLING,
            {100: 2.0},
            GOOD,
            "from 5.500 nats a token to 1.720, 14% below the loss on unseen text.",
        ),
        (FALLING, {50: 1.5, 100: 1.6}, FAIR, "It was better, 1.500, after step 50"),
        (
            [*FALLING[:80], *[0.9] * 20],
            {50: 1.5, 100: 1.6},
            FAIR,
            "It memorizes its training text.",
        ),
        (FALLING[::-1], {100: 6.0}, BAD, "no better than at the start"),
        (FALLING, {}, GOOD, "There was no validation"),
        ([5.0], {}, FAIR, "Too few steps"),
        (
            [5.5 - 1e-6 * i for i in range(100)],
            {100: 5.49},
            FAIR,
            "a fall of less than 2%",
        ),
        (
            [5.5 - 1e-6 * i for i in range(100)],
            {},
            FAIR,
            "no validation. That is a fall of less than 2%",
        ),
        (
            FALLING[:20] + [math.nan] * 80,
            {20: 4.7},
            BAD,
            "Most of the last 10 training losses are not finite",
        ),
        ([*FALLING, math.nan], {101: 1.6}, GOOD, "1.600 nats"),
        (
            FALLING,
            {50: 3.5, 100: math.inf},
            BAD,
            "The last validation loss is not finite",
        ),
    ],
)
def test_whether_it_learns(losses, val, grade, says):
    answer = learning(history(rows(losses, val)))
    assert (answer.grade, says in answer.text) == (grade, True), answer


LEVEL = [2.0 - 0.05 * (-1) ** i for i in range(100)]


@pytest.mark.parametrize(
    ("losses", "val", "grade", "says"),
    [
        (
            LEVEL,
            {100: 2.1},
            GOOD,
            "nats a token (mean of the first 10 steps, {} runs/a after step 900) to",
        ),
        (LEVEL, {}, GOOD, "There was no validation."),
        (
            [*LEVEL[:50], *(2.1 + x - 2 for x in LEVEL[:50])],
            {100: 2.1},
            FAIR,
            "worse than at its start, by 5.0%",
        ),
        # of single steps, which vary as much
        ([2.0, 2.2] * 10 + [2.1, 2.3], {}, GOOD, "no validation."),
        (LEVEL, {50: 1.9, 100: 2.1}, FAIR, "It was better, 1.900, after step 50"),
    ],
)
def test_what_begins_with_weights_is_judged_by_what_it_began_with(
    losses, val, grade, says
):
    for fact in ("forked from", "weights from"):
        answer = learning(history(rows(losses, val), **{fact: "runs/a after step 900"}))
        assert (answer.grade, says.format(fact) in answer.text) == (grade, True), answer
    assert learning(history(rows(losses, val))).grade != GOOD


def validated(val, tokens):
    """Return a history of validations that read so many tokens."""
    logged = rows(FALLING, val)
    for step, read in tokens.items():
        logged[step - 1]["val/tokens"] = read
    return history(logged)


def test_a_validation_of_more_tokens_is_not_compared_with_those_before():
    """The text of the final validation may be harder, or easier."""

    def answer(val):
        result = learning(validated(val, dict.fromkeys(val, 8) | {100: 72}))
        return result.grade, result.text

    grade, text = answer({50: 1.5, 75: 1.49, 100: 1.6})
    assert (grade, "better" in text) == (GOOD, False)
    assert "Since step 50 it still fell by 0.7%" in text  # until step 75
    grade, text = answer({25: 1.4, 50: 1.5, 100: 1.3})
    assert grade == FAIR
    assert "better, 1.400, after step 25 than after step 50, 1.500." in text
    # A run that was trained longer has the final validation of its first end.
    longer = {30: 1.6, 50: 1.2, 75: 1.55, 100: 1.3}
    run = validated(longer, {30: 8, 50: 72, 75: 8, 100: 72})
    assert run.comparable_validations == [(30, 1.6), (75, 1.55)]
    assert learning(run).grade == GOOD


def test_the_course_of_a_fork_is_that_of_its_own_steps():
    actual = [
        row | {"step": row["step"] + 900} for row in rows(LEVEL, {50: 3.0, 100: 2.1})
    ]
    assert (
        "Since step 950 it still fell by 30.0%"
        in learning(history(actual, **{"forked from": "a"})).text
    )


HUNG = "no progress for 1800 s, in step 10; ended; checkpoints: 5"
STOPPED = "stopped: step 9: 3 steps in a row were not finite"


@pytest.mark.parametrize(
    ("event", "counts", "grade", "says"),
    [
        ("", {}, GOOD, "No step was skipped"),
        (
            "step 5 skipped (loss nan)",
            {"skipped": 1},
            FAIR,
            "steps: 1 skipped (not fin",
        ),
        ("step 5 skipped", {"skipped": 9}, BAD, "9 skipped (not finite)"),
        ("x; back to the state after step 5", {"rollbacks": 1}, FAIR, "1 rolled back"),
        (STOPPED, {}, BAD, "The watchdog stopped it: step 9"),
        ("stalled: no progress for 301 s, in step 10", {}, FAIR, "1 stalled"),
        (HUNG, {}, FAIR, "1 ended because it hung"),
        (
            "not stopped within 300 s of the signal; the run was still in step 10; ended",
            {},
            FAIR,
            "it did not stop",
        ),
    ],
)
def test_whether_it_is_healthy(event, counts, grade, says):
    more = {f"watchdog/{name}": count for name, count in counts.items()}
    answer = healthy(history(rows(SMOOTH, **more), [(9, event)] * bool(event)))
    assert (answer.grade, says in answer.text) == (grade, True), answer


def test_skipped_steps_are_a_share_of_the_steps_not_of_the_logged_rows():
    """As with `train.log_every=10`."""
    logged = rows(SMOOTH, **{"watchdog/skipped": 9})
    logged = [row | {"step": 10 * row["step"]} for row in logged]
    answer = healthy(history(logged, [(9, "step 5 skipped (loss nan)")]))
    assert (answer.grade, "In 2,000 steps: 9 skipped" in answer.text) == (FAIR, True)


def test_a_jump_of_the_loss_is_told_before_the_watchdog_judges_and_noise_is_none():
    spiking = [3.0 - 0.01 * i + 0.02 * (i % 3) for i in range(60)]
    assert "no spike" in healthy(history(rows(spiking))).text
    spiking[13:15] = [10.3, 4.8]
    answer = healthy(history(rows(spiking)))
    assert answer.grade == FAIR
    assert "jumped from a median of 2.94 to 10.3 in step 14" in answer.text
    assert "no spike" not in answer.text
    spiking[40] = 6.0
    assert (
        "jumped 2 times, at most from a median of 2.94"
        in healthy(history(rows(spiking))).text
    )


@pytest.mark.parametrize(
    ("config", "numerics", "grade", "says"),
    [
        (
            FP8,
            (),
            UNRATED,
            "no numerics were recorded. Set metrics.numerics_every=250",
        ),
        ("precision: {compute: bf16}", (), UNRATED, "no numerics were recorded"),
        ("precision: {compute: fp32, forward: null, mu: fp32}", (), GOOD, "no stall."),
        (FP8, tensor(saturated=0.0), GOOD, "no stall."),
    ],
)
def test_narrow_formats_that_nobody_looked_at_are_not_called_healthy(
    config, numerics, grade, says
):
    answer = healthy(
        history(
            rows(FALLING), config=config, **({"numerics": numerics} if numerics else {})
        )
    )
    assert (answer.grade, says in answer.text) == (grade, True), answer


def test_the_loss_is_put_beside_blind_guessing_other_compressors_and_how_often_the_text_was_read():
    actual = rows(FALLING, {100: 2.0})
    actual[-1] |= {"val/bits_per_byte": 2.5, "val/xz_bits_per_byte": 3.25}
    facts = {"vocabulary": "1,000", "training tokens": "5,000"}
    text = learning(history(actual, **facts)).text
    assert (
        "2.000 nats a token: 2.50 bits per byte, where raw text has 8 and the"
        " compressor xz" in text
    )
    assert f"(blind guessing among 1,000 tokens: {math.log(1000):.3f})" in text
    # 100 steps of 100 tokens
    assert "training text was read 2.0 times, so part of it may be memorized." in text
    facts["training tokens"] = "10,000"
    assert (
        "was read 1.0 times, so it can hardly be memorized: the two texts differ in"
        in learning(history(actual, **facts)).text
    )


@pytest.mark.parametrize(
    ("value", "bits", "facts", "grade", "says"),
    [
        (
            5.498,
            7.97,
            {"vocabulary": "256"},
            FAIR,
            "Blind guessing among 256 tokens comes to 5.545: it has hardly begun",
        ),
        (5.2, 7.5, {"vocabulary": "256"}, GOOD, "7.50 bits"),
        (
            10.7,
            2.5,
            {"vocabulary": "50,257"},
            FAIR,
            "Blind guessing among 50,257 tokens comes to 10.825",
        ),
        # as a run before facts were kept
        (5.5, 7.97, {}, FAIR, "Unknown text takes as many bits"),
        (
            3.0,
            4.3,
            {"validation tokens": "228"},
            FAIR,
            "mean of 228 tokens only, which is accurate to about ±13%",
        ),
        (
            3.0,
            4.3,
            {"validation tokens": "1,599"},
            FAIR,
            "mean of 1,599 tokens only",
        ),
        (3.0, 4.3, {"validation tokens": "1,601"}, GOOD, "3.000 nats"),
    ],
)
def test_learning_its_training_text_alone_is_not_learning(
    value, bits, facts, grade, says
):
    actual = rows([12.0 - 0.08 * i for i in range(100)], {100: value})
    actual[-1]["val/bits_per_byte"] = bits
    answer = learning(history(actual, **facts))
    assert (answer.grade, says in answer.text) == (grade, True), answer


def test_a_mixture_was_read_as_often_as_its_samples_not_its_tokens():
    actual = rows(FALLING, {100: 1.6})
    for source, share, epochs in (("small", 0.97, 36.0), ("large", 0.03, 0.02)):
        actual[-1][f"data/{source}/share"] = share
        actual[-1][f"data/{source}/epochs"] = epochs
    facts = {"training tokens": "100,000"}
    assert history(actual, **facts).epochs == pytest.approx(34.9206)


def test_what_was_validated_counts_not_what_there_was():
    actual, facts = rows(FALLING, {100: 1.6}), {"validation tokens": "100,000"}
    for tokens, grade in ((512, FAIR), (8192, GOOD)):
        actual[-1]["val/tokens"] = tokens
        assert learning(history(actual, **facts)).grade == grade


def test_what_the_weights_come_to_in_other_precisions_is_said():
    evaluation = SavedEvaluation(100, 4096, {"as trained": 2.0, "fp32": 1.99})
    says = (
        "is 2.0000 as trained, 1.9900 in fp32 (-0.50%): this is the cost of"
        " inference in that precision, not of training in it."
    )
    for losses in (FALLING, FALLING[::-1]):
        actual = History(
            "a run", rows(losses, {100: 2.0}), [], "", evaluation=evaluation
        )
        assert learning(actual).text.endswith(says)
    later = History(
        "a run",
        rows([*FALLING, 1.0], {100: 2.0, 101: 1.9}),
        [],
        "",
        evaluation=evaluation,
    )
    assert "of the same weights" not in learning(later).text  # which have gone on since


@pytest.mark.parametrize(
    ("figures", "config", "grade", "says"),
    [
        (
            tensor(saturated=0.002),
            FP8,
            GOOD,
            (
                "worst tensor: the inputs of h.1.mlp.c_proj): 0.2% of that tensor's"
                " values (harmless below 1%)."
            ),
        ),
        (tensor(saturated=0.02), FP8, FAIR, "(too much from 1%)"),
        (tensor(saturated=0.2), FP8, BAD, "20.0% of that tensor's values"),
        # What is lost is at most half of E4M3's smallest number, 2^-9, in a quarter of
        # the values: 0.5 x 2^-10 / rms.
        (
            tensor(underflow=0.25, rms=1.0),
            FP8,
            GOOD,
            (
                "the inputs of h.1.mlp.c_proj): at most 0.05% of that tensor's RMS"
                " (harmless below 1%)"
            ),
        ),
        (
            tensor(underflow=0.25, rms=0.01),
            FP8,
            FAIR,
            "of that tensor's RMS (too much from 1%)",
        ),
        (
            tensor(underflow=0.25, rms=0.001),
            FP8,
            BAD,
            "at most 48.83% of that tensor's RMS",
        ),
        (
            tensor("weights", "h.0.attn.c_attn.kernel", underflow=0.25),
            FP8,
            GOOD,
            "worst tensor: the weights of h.0.attn.c_attn): ",
        ),
        # E5M2 has numbers down to 2^-16, FP16 to 2^-24.
        (
            tensor(
                "activation_gradients", "h.1.mlp.c_fc.out", underflow=0.25, rms=0.001
            ),
            FP8,
            GOOD,
            "at most 0.38% of that",
        ),
        (
            tensor(
                "weight_gradients", "h.1.mlp.c_fc.kernel", underflow=0.25, rms=0.001
            ),
            FP8.replace("weight_grad: e5m2", "weight_grad: fp16"),
            GOOD,
            "at most 0.00%",
        ),
        (
            tensor(underflow=1.0, rms=0.0),
            FP8,
            BAD,
            "at most 100.00% of that tensor's RMS",
        ),
        (
            tensor(underflow=0.25, rms=1.0)
            | tensor(layer="h.0.attn.c_attn.in", underflow=0.1, rms=0.01),
            FP8,
            FAIR,
            "the inputs of h.0.attn.c_attn): at",
        ),
        (
            tensor(underflow=0.5, rms=1e-6),
            FP8,
            BAD,
            "at most 100.00% of that tensor's RMS",
        ),
        # E4M3 flushes values that E5M2 keeps.
        (
            tensor("activation_gradients", "h.0.mlp.c_fc.out", underflow=0.5, rms=0.01),
            FP8.replace("backward:", "backward_e4m3: ['h.0.*'], backward:"),
            FAIR,
            "the gradients of the outputs of h.0.mlp.c_fc",
        ),
        # What is not cast to eight bits, or not known to be.
        *(
            (
                tensor(kind, layer, underflow=0.9, saturated=0.9, rms=1e-6),
                FP8,
                GOOD,
                "no stall.",
            )
            for kind, layer in (
                ("weight_gradients", "wte.embedding"),
                ("weight_gradients", "h.0.attn.c_attn.bias"),
                ("activations", "h.0.in"),
                ("activations", "h.0.mlp.c_fc.out"),
                ("activations", "h.0.ln_2.out"),
                ("activation_gradients", "h.0.mlp.c_fc.in"),
                ("mu", "h.0.mlp.c_fc.kernel"),
            )
        ),
        (tensor(underflow=0.9, rms=1e-6), "", GOOD, "no stall."),
        # a bound
        (
            tensor(underflow=0.6, rms=1e-4),
            FP8.replace("propagate", "delayed"),
            GOOD,
            "no stall.",
        ),
        (
            tensor(underflow=0.6, rms=1e-4),
            FP8.replace("forward: e4m3", "forward: null"),
            GOOD,
            "no stall.",
        ),
    ],
)
def test_what_eight_bits_lose_is_judged_by_how_much_of_the_tensor_it_is(
    figures, config, grade, says
):
    answer = healthy(history(rows(FALLING), config=config, numerics=figures))
    assert (answer.grade, says in answer.text) == (grade, True), answer


@pytest.mark.parametrize(
    ("layer", "fp8_layers", "grade"),
    [
        ("h.1.mlp.c_proj", "none", GOOD),
        ("h.1.mlp.c_proj", "h.*.mlp.c_proj", BAD),
        ("h.1.mlp.c_proj", "h.0.attn.c_attn h.1.mlp.c_proj", BAD),
        ("h.1.mlp.c_proj", "h.11.mlp.c_proj", GOOD),
        ("h.1.mlp.down_proj", "h.0.mlp.down_proj h.1.mlp.down_proj", BAD),
    ],
)
def test_layers_that_are_cast_to_fp8_are_judged_in_every_family(
    layer, fp8_layers, grade
):
    facts = {"FP8 layers": fp8_layers}
    numerics = tensor(layer=f"{layer}.in", saturated=0.2)
    answer = healthy(history(rows(FALLING), config=FP8, numerics=numerics, **facts))
    assert answer.grade == grade


@pytest.mark.parametrize(
    ("speed", "more", "grade", "says"),
    [
        (
            lambda i: 1000.0 + i % 2,
            {},
            UNRATED,
            "1k tokens/s, 100.0 ms a step; 1.0% of it waiting for data",
        ),
        (
            lambda i: 1000.0,
            {},
            UNRATED,
            "Steady to the end.\nThe peak rate of this device is not known.",
        ),
        (lambda i: 1000.0, {}, UNRATED, "Its steps took 0:00:10 (h:mm:ss)."),
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
            "500 tokens/s at the end. Other load",
        ),
        (
            lambda i: 1000.0,
            {"perf/data_ms": 50.0},
            FAIR,
            "Waiting for data slows it down.",
        ),
        (lambda i: 1000.0, {"perf/mfu": 0.4}, GOOD, "40.0% of the devices' peak"),
        (
            lambda i: 1000.0,
            {"perf/mfu": 0.005},
            FAIR,
            "0.5% of the devices' peak",
        ),
        (
            lambda i: 10000.0 if i % 3 else 100.0,
            {},
            UNRATED,
            "slowest tenth of its steps ran at 100 tokens/s or less",
        ),
    ],
)
def test_whether_it_is_fast(speed, more, grade, says):
    answer = fast(
        history(rows(FALLING, speed=speed, **more), config="checkpoint: {every: 30}")
    )
    assert (answer.grade, says in answer.text) == (grade, True), answer


def test_steps_that_have_no_row_count_too():
    sparse = rows(FALLING, speed=lambda i: 1000.0)[9::10]  # train.log_every=10
    # those before the first row are not known
    assert "Its steps took 0:00:09 (h:mm:ss)." in fast(history(sparse)).text
