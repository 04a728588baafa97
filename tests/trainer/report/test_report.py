"""The report answers rightly, is whole in one file, and a browser shows it."""

import json
import math
import re
import shutil
import subprocess

import pytest

from scripts.compare import Arguments, main, names
from trainer.errors import UserError
from trainer.observe.records import encode_row
from trainer.report.history import Evaluation, History
from trainer.report.page import render, write_report
from trainer.report.verdicts import BAD, FAIR, GOOD, UNRATED, fast, healthy, learning

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def rows(losses, val=(), speed=lambda i: 1000.0, **more):
    """Of steps 1, 2, ...; `val`: {step: loss}."""
    found = []
    for i, loss in enumerate(losses, 1):
        row = {"train/loss": loss, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100 * i, "watchdog/skipped": 0} | more
        row = {"perf/tokens_per_s": speed(i), "perf/step_ms": 100.0, "perf/data_ms": 1.0} | row
        row |= {"val/loss": dict(val)[i]} if i in dict(val) else {}
        found.append({"step": i} | row)
    return found


def history(found, events=(), config="", numerics=None, **facts):
    return History(
        "a run",
        found,
        list(events),
        config,
        [(100, numerics)] if numerics else [],
        facts={"wide layers": "none"} | facts,
    )


FALLING = [5.5 - 0.04 * i for i in range(100)]


@pytest.mark.parametrize(
    ("losses", "val", "grade", "says"),
    [
        (FALLING, {50: 3.5, 100: 1.6}, GOOD, "Since step 50 it still fell by 54.3%"),
        (FALLING, {50: 1.6, 75: 1.605, 100: 1.6}, GOOD, "Since step 75 it was level."),
        (FALLING, {50: 1.7, 75: 1.6, 100: 1.62}, GOOD, "Since step 75 it rose by 1.2%."),
        (FALLING, {10: 3.5, 100: 1.6}, GOOD, "1.600 nats a token.\nThe loss on"),  # too long ago to be the end's course
        (FALLING, {100: 2.0}, GOOD, "from 5.500 nats a token to 1.720, 14% below the loss on text it never saw."),
        (FALLING, {50: 1.5, 100: 1.6}, FAIR, "It was better, 1.500, after step 50"),
        ([*FALLING[:80], *[0.9] * 20], {50: 1.5, 100: 1.6}, FAIR, "It learns its training text by heart."),
        (FALLING[::-1], {100: 6.0}, BAD, "no better than at the start"),
        (FALLING, {}, GOOD, "There was no validation"),
        ([5.0], {}, FAIR, "Too few steps"),
        ([5.5 - 1e-6 * i for i in range(100)], {100: 5.49}, FAIR, "a fall of less than 2%"),
        ([5.5 - 1e-6 * i for i in range(100)], {}, FAIR, "no validation. That is a fall of less than 2%"),
        (FALLING[:20] + [math.nan] * 80, {20: 4.7}, BAD, "Of the last 10 training losses most are not finite"),
        ([*FALLING, math.nan], {101: 1.6}, GOOD, "1.600 nats"),
        (FALLING, {50: 3.5, 100: math.inf}, BAD, "The last validation loss is not finite"),
    ],
)
def test_whether_it_learns(losses, val, grade, says):
    answer = learning(history(rows(losses, val)))
    assert (answer.grade, says in answer.text) == (grade, True), answer


@pytest.mark.parametrize(
    ("events", "more", "grade", "says"),
    [
        ([], {}, GOOD, "No step was skipped"),
        ([(5, "step 5 skipped (loss nan)")], {"watchdog/skipped": 1}, FAIR, "In 200 steps: 1 skipped (not finite);"),
        ([(5, "step 5 skipped")], {"watchdog/skipped": 9}, BAD, "9 skipped (not finite)"),
        (
            [(9, "x; back to the state after step 5, batches ... left out")],
            {"watchdog/rollbacks": 1},
            FAIR,
            "1 rolled back",
        ),
        ([(9, "stopped: step 9: 3 steps in a row were not finite")], {}, BAD, "The watchdog stopped it: step 9"),
        ([(9, "stalled: no progress for 301 s, in step 10")], {}, FAIR, "1 stalled"),
        ([(9, "no progress for 1800 s, in step 10; ended; checkpoints: 5")], {}, FAIR, "1 ended because it hung"),
        ([(9, "not stopped within 300 s of the signal, but in step 10; ended")], {}, FAIR, "it did not stop"),
    ],
)
def test_whether_it_is_healthy(events, more, grade, says):
    answer = healthy(history(rows(FALLING * 2, **more), events))
    assert (answer.grade, says in answer.text) == (grade, True), answer


def test_the_loss_is_put_beside_blind_guessing_other_compressors_and_how_often_the_text_was_read():
    found = rows(FALLING, {100: 2.0})
    found[-1] |= {"val/bits_per_byte": 2.5, "val/xz_bits_per_byte": 3.25}
    facts = {"vocabulary": "1,000", "training tokens": "5,000"}
    text = learning(history(found, **facts)).text
    assert "2.000 nats a token: 2.50 bits for a byte of it, where raw text has 8 and the compressor xz" in text
    assert f"(blind guessing among 1,000 tokens: {math.log(1000):.3f})" in text
    assert "never saw. It was read 2.0 times, part of it may be known by heart." in text  # 100 steps of 100 tokens
    facts["training tokens"] = "10,000"
    assert (
        "It was read 1.0 times, which is hardly by heart: the texts differ." in learning(history(found, **facts)).text
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
        (10.7, 2.5, {"vocabulary": "50,257"}, FAIR, "Blind guessing among 50,257 tokens comes to 10.825"),
        (5.5, 7.97, {}, FAIR, "Text that nothing is known of takes as many bits"),  # as a run before facts were kept
        (3.0, 4.3, {"validation tokens": "228"}, FAIR, "That is of 228 tokens only, which tell it to about ±13%"),
        (3.0, 4.3, {"validation tokens": "1,599"}, FAIR, "That is of 1,599 tokens only"),
        (3.0, 4.3, {"validation tokens": "1,601"}, GOOD, "3.000 nats"),
    ],
)
def test_learning_its_training_text_alone_is_not_learning(value, bits, facts, grade, says):
    found = rows([12.0 - 0.08 * i for i in range(100)], {100: value})
    found[-1]["val/bits_per_byte"] = bits
    answer = learning(history(found, **facts))
    assert (answer.grade, says in answer.text) == (grade, True), answer


def test_what_was_validated_counts_not_what_there_was():
    found, facts = rows(FALLING, {100: 1.6}), {"validation tokens": "100,000"}
    for batches, grade in ((1, FAIR), (16, GOOD)):
        config = f"train: {{final_eval_batches: {batches}, batch_tokens: 512}}"
        assert learning(history(found, config=config, **facts)).grade == grade


def test_what_the_weights_come_to_in_other_precisions_is_said():
    evaluation = Evaluation(100, 4096, {"as trained": 2.0, "fp32": 1.99})
    says = "is 2.0000 as trained, 1.9900 in fp32 (-0.50%): what the precision costs in use, not in training."
    for losses in (FALLING, FALLING[::-1]):
        found = History("a run", rows(losses, {100: 2.0}), [], "", evaluation=evaluation)
        assert learning(found).text.endswith(says)
    later = History("a run", rows([*FALLING, 1.0], {100: 2.0, 101: 1.9}), [], "", evaluation=evaluation)
    assert "of the same weights" not in learning(later).text  # which have gone on since


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"step": 1, "tokens": 1, "results": [{"precision": "fp32", "loss": 1.0}]}']
)
def test_a_damaged_evaluation_is_named(run_dir, text):
    (run_dir / "evaluation.json").write_text(text)
    with pytest.raises(UserError, match=r"evaluation\.json is damaged; remove it"):
        write_report(run_dir)


def test_facts_that_are_damaged_or_old_are_left_out(run_dir):
    (run_dir / "environment.txt").write_text("vocabulary: 0\ntext: a book\ntraining tokens: many\n")
    assert "a book (0 training tokens, read 0.0 times" in write_report(run_dir).read_text()
    (run_dir / "environment.txt").write_bytes(b"\xff\n")
    assert "blind guessing" not in write_report(run_dir).read_text()


def test_figures_that_are_not_finite_do_not_stop_the_report(run_dir):
    figures = tensor(underflow=0.25, rms=math.nan) | tensor("weights", "h.0.mlp.c_fc.kernel", underflow=math.nan)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(encode_row(200, {"train/loss": math.nan, "tokens": 9} | figures))
    (run_dir / "config.yaml").write_text(FP8)
    (run_dir / "environment.txt").write_text("wide layers: none\n")
    assert "at most 25.00% of their RMS, the activations" in write_report(run_dir).read_text()


FP8 = "precision: {forward: e4m3, backward: e5m2, weight_grad: e5m2, scaling: propagate}"


def tensor(kind="activations", layer="h.1.mlp.c_proj.in", **figures):
    """Figures of a tensor, as a row of numerics has them."""
    figures = {"exponent": 0.0, "underflow": 0.0, "saturated": 0.0, "rms": 1.0} | figures
    return {f"numerics/{kind}/{layer}/{figure}": value for figure, value in figures.items()}


@pytest.mark.parametrize(
    ("figures", "config", "grade", "says"),
    [
        (
            tensor(saturated=0.002),
            FP8,
            GOOD,
            "last look: 0.2% of the values, the activations that go into h.1.mlp.c_proj (harmless below 1%).",
        ),
        (tensor(saturated=0.02), FP8, FAIR, "(too much from 1%)"),
        (tensor(saturated=0.2), FP8, BAD, "20.0% of the values, the"),
        # What is lost is at most half of E4M3's smallest number, 2^-9, in a quarter of the values: 0.5 x 2^-10 / rms.
        (
            tensor(underflow=0.25, rms=1.0),
            FP8,
            GOOD,
            "Rounded to zero by the narrow format, where it was most at the last look",
        ),
        (
            tensor(underflow=0.25, rms=1.0),
            FP8,
            GOOD,
            "at most 0.05% of their RMS, the activations that go into h.1.mlp.c_proj (harmless below 1%)",
        ),
        (tensor(underflow=0.25, rms=0.01), FP8, FAIR, "h.1.mlp.c_proj (too much from 1%)"),
        (tensor(underflow=0.25, rms=0.001), FP8, BAD, "at most 48.83% of their RMS"),
        (
            tensor("weights", "h.0.attn.c_attn.kernel", underflow=0.25),
            FP8,
            GOOD,
            "the weights of h.0.attn.c_attn (harm",
        ),
        # E5M2 has numbers down to 2^-16, FP16 to 2^-24.
        (
            tensor("activation_gradients", "h.1.mlp.c_fc.out", underflow=0.25, rms=0.001),
            FP8,
            GOOD,
            "at most 0.38% of the",
        ),
        (
            tensor("weight_gradients", "h.1.mlp.c_fc.kernel", underflow=0.25, rms=0.001),
            FP8,
            GOOD,
            "at most 0.38% of the",
        ),
        (
            tensor("weight_gradients", "h.1.mlp.c_fc.kernel", underflow=0.25, rms=0.001),
            FP8.replace("weight_grad: e5m2", "weight_grad: fp16"),
            GOOD,
            "at most 0.00%",
        ),
        (tensor(underflow=1.0, rms=0.0), FP8, BAD, "at most 100.00% of their RMS"),
        (
            tensor(underflow=0.25, rms=1.0) | tensor(layer="h.0.attn.c_attn.in", underflow=0.1, rms=0.01),
            FP8,
            FAIR,
            "into h.0.attn.c_attn (too",
        ),
        (tensor(underflow=0.5, rms=1e-6), FP8, BAD, "at most 100.00% of their RMS"),
        # What is not cast to eight bits, or not known to be.
        *(
            (tensor(kind, layer, underflow=0.9, saturated=0.9, rms=1e-6), FP8, GOOD, "no stall.")
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
        (tensor(underflow=0.6, rms=1e-4), FP8.replace("propagate", "delayed"), GOOD, "no stall."),  # a bound
        (tensor(underflow=0.6, rms=1e-4), FP8.replace("forward: e4m3", "forward: null"), GOOD, "no stall."),
    ],
)
def test_what_eight_bits_lose_is_judged_by_how_much_of_the_tensor_it_is(figures, config, grade, says):
    answer = healthy(history(rows(FALLING), config=config, numerics=figures))
    assert (answer.grade, says in answer.text) == (grade, True), answer


@pytest.mark.parametrize(
    ("wide", "grade"),
    [("none", BAD), ("*", GOOD), ("h.*.mlp.c_proj", GOOD), ("h.0.attn.c_attn h.1.mlp.c_proj", GOOD), ("h.11.*", BAD)],
)
def test_what_no_matmul_casts_is_not_judged(wide, grade):
    facts = {"wide layers": wide}
    assert healthy(history(rows(FALLING), config=FP8, numerics=tensor(saturated=0.2), **facts)).grade == grade


@pytest.mark.parametrize(
    ("speed", "more", "grade", "says"),
    [
        (lambda i: 1000.0 + i % 2, {}, UNRATED, "1k tokens/s, 100.0 ms a step; 1.0% of it waiting for data"),
        (lambda i: 1000.0, {}, UNRATED, "Steady to the end.\nWhat this device could do at most is not known."),
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
            "500 tokens/s at the end. Whatever else ran",
        ),
        (lambda i: 1000.0, {"perf/data_ms": 50.0}, FAIR, "The data hold it up."),
        (lambda i: 1000.0, {"perf/mfu": 0.4}, GOOD, "40.0% of what the devices can do"),
        (lambda i: 1000.0, {"perf/mfu": 0.005}, FAIR, "0.5% of what the devices can do"),
        (lambda i: 10000.0 if i % 3 else 100.0, {}, UNRATED, "slowest tenth of its steps ran at 100 tokens/s or less"),
    ],
)
def test_whether_it_is_fast(speed, more, grade, says):
    answer = fast(history(rows(FALLING, speed=speed, **more), config="checkpoint: {every: 30}"))
    assert (answer.grade, says in answer.text) == (grade, True), answer


def test_steps_that_have_no_row_count_too():
    sparse = rows(FALLING, speed=lambda i: 1000.0)[9::10]  # train.log_every=10
    assert "Its steps took 0:00:09 (h:mm:ss)." in fast(history(sparse)).text  # those before the first row are not known


@pytest.mark.parametrize(
    ("steps", "events", "says"),
    [
        (100, [], "100 of 100 steps: finished"),
        (2000, [], "100 of 2,000 steps: not finished"),
        (
            2000,
            [(100, "stopped: step 100: 3 steps in a row were not finite")],
            "of 2,000 steps: ended by the watch",
        ),
        (2000, [(100, "no progress for 9 s, in step 101; ended; checkpoints: 50")], "steps: ended because it hung"),
        (100, [(40, "no progress for 9 s, in step 41; ended; checkpoints: 30")], "100 of 100 steps: finished"),
        (None, [], "100 steps: not known whether finished"),
    ],
)
def test_the_head_says_how_it_ended_and_what_it_was(steps, events, says):
    config = "model: {name: gpt2_nano}\nprecision: {name: bf16}\n" + (f"train: {{steps: {steps}}}" if steps else "")
    page = render(history(rows(FALLING), events, config), pictures={}, sample="", environment="")
    first, second, third = re.findall("<p class=sub>(.*?)</p>", page)[:3]
    assert says in first
    assert first.endswith("; 10k tokens")
    assert (second, third) == ("model gpt2_nano", "precision bf16")


def test_the_head_says_what_was_trained_on_what():
    config = "model: {name: gpt2_nano}\nprecision: {name: bf16}\nseed: 3\n"
    facts = {"parameters": "842,496", "vocabulary": "256", "tokenizer": "byte", "training tokens": "4,000"}
    facts |= {"text": "a book", "validation tokens": "400", "arithmetic": "matmuls in bf16", "host": "2 CPU cores"}
    page = render(
        history(rows(FALLING), config=config, devices="1 x cpu (cpu)", **facts), pictures={}, sample="", environment=""
    )
    assert re.findall("<p class=sub>(.*?)</p>", page)[1:3] == [
        "model gpt2_nano, 842,496 parameters; a book (4,000 training tokens, read 2.5 times; 400 for validation; "
        "tokenizer byte, 256 ids); 1 x cpu (cpu), 2 CPU cores; seed 3",
        "precision bf16: matmuls in bf16",
    ]


def test_what_underflow_takes_is_charted_as_a_share_of_the_rms_with_its_limit():
    page = render(
        history(rows(FALLING), config=FP8, numerics=tensor(underflow=0.25)), pictures={}, sample="", environment=""
    )
    assert "<title>activations 0.0488281 after step 100</title>" in page
    assert "at most so many % of a tensor&#x27;s RMS" in page


def test_the_gradient_norm_is_shown_with_the_limit_where_that_mattered():
    found = rows(FALLING)
    found[9]["grad_norm"] = 3.0
    pages = [
        render(history(found, config=f"optimizer: {{clip_norm: {clip}}}"), pictures={}, sample="", environment="")
        for clip in ("2.0", "4.0", "null")
    ]
    assert ["which 1.0% of the steps had" in page for page in pages] == [True, False, False]
    assert ["</i>limit</span>" in page for page in pages] == [True, False, False]


@pytest.fixture
def run_dir(tmp_path):
    """Of a run with NaN, events, a picture, and what HTML must not take for its own."""
    found = rows([*FALLING, float("nan")], {50: 3.5, 100: 1.6})
    lines = [encode_row(row["step"], {k: v for k, v in row.items() if k != "step"}) for row in found]
    lines.insert(40, encode_row(40, {"event": "step 40 skipped (<script>alert(1)</script>)"}))
    folder = tmp_path / "runs" / "a<b"
    (folder / "numerics").mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    (folder / "config.yaml").write_text("seed: 0\ndata: {name: '</pre><img src=x>'}\n")
    (folder / "environment.txt").write_text("parameters: 1\nseen: <b>\n\nparameters: 2\n")
    (folder / "numerics" / "weights.png").write_bytes(b"\x89PNG")
    return folder


def test_the_report_is_one_file_that_asks_the_network_for_nothing(run_dir):
    text = write_report(run_dir).read_text()
    assert not re.search(r"https?:|<link|<script|url\(|@import", text.replace("&lt;script&gt;", ""))
    assert "data:image/png;base64,iVBORw==" in text
    assert "<img src=x>" not in text
    for title in ("Loss", "Learning rate", "Gradient norm", "Throughput", "Memory", "Scales"):
        assert f"<b>{title}</b>" in text
    assert "step 40 skipped (&lt;script&gt;" in text


def test_a_history_has_the_last_figures_of_every_layer_and_the_last_starts_facts(run_dir):
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(encode_row(200, {"train/loss": 1.0, "tokens": 9} | tensor(underflow=0.125)))
        file.write(encode_row(201, {"train/loss": 1.0, "tokens": 9}))
    found = History.read(run_dir)
    assert found.looks == [(200, tensor(underflow=0.125))]
    assert found.line("numerics/activations/underflow_max").ys == [0.125]
    assert found.facts == {"parameters": "2"}


def test_a_directory_without_a_log_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        write_report(tmp_path)


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_a_browser_shows_it(run_dir, tmp_path):
    """What the page is after layout: every chart has a size, and the three answers are on the first screen."""
    page = write_report(run_dir)
    probe = """<script>addEventListener('load', () => { const box = e => e.getBoundingClientRect();
      document.body.dataset.found = JSON.stringify({svg: [...document.querySelectorAll('svg')].map(e => box(e).height),
      cards: [...document.querySelectorAll('.card')].map(e => box(e).bottom),
      wide: document.body.scrollWidth})})</script>"""
    copy = tmp_path / "probe.html"
    copy.write_text(page.read_text().replace("</head>", probe + "</head>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,900", f"--user-data-dir={tmp_path}/p"]
    done = subprocess.run([BROWSER, *flags, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120)
    found = json.loads(re.search(r'data-found="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))
    assert len(found["svg"]) == 4  # loss, learning rate, gradient norm, throughput: no memory, no numerics recorded
    assert all(100 < height < 400 for height in found["svg"])
    assert len(found["cards"]) == 3
    assert max(found["cards"]) < 500
    assert found["wide"] <= 1240


def test_runs_are_compared_in_a_table_that_names_what_differs(run_dir, tmp_path, monkeypatch, capsys):
    other = tmp_path / "runs" / "c"
    shutil.copytree(run_dir, other)
    (other / "config.yaml").write_text("seed: 1\ndata: {name: '</pre><img src=x>'}\n")
    monkeypatch.chdir(tmp_path)
    main(Arguments("runs/*", "out.html"))
    printed = capsys.readouterr().out
    assert re.search(r"^seed +0 +1$", printed, re.MULTILINE)
    assert "data.name" not in printed
    assert re.search(r"^best validation loss +1\.6 +1\.6$", printed, re.MULTILINE)
    assert "Training loss" in (tmp_path / "out.html").read_text()


def test_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart(tmp_path):
    assert names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    with pytest.raises(UserError, match="given twice"):
        names([tmp_path, tmp_path])


def test_the_page_has_a_chart_of_each_sharpness_and_of_the_edge_only_where_it_was_looked_for():
    found = rows(FALLING)
    bare = render(history(found), pictures={}, sample="", environment="")
    found[49] |= {"sharpness/logits": 0.07, "sharpness/critical": 500.0}
    page = render(history(found), pictures={}, sample="", environment="")
    for title in ("Sharpness of the logits", "Learning rate over the critical one"):
        figure = page[page.index(title) :].split("</figure>")[0]
        assert "not recorded" not in figure
        assert "not recorded" in bare[bare.index(title) :].split("</figure>")[0]
    assert "0.25 after step 50" in page  # a rate of 1e-3 where the critical one is 2 / 500
