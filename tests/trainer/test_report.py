"""The report answers rightly, is whole in one file, and a browser shows it."""

import json
import math
import re
import shutil
import subprocess

import pytest

from scripts.compare import Arguments, main, names
from trainer.errors import UserError
from trainer.records import encode_row
from trainer.report import BAD, FAIR, GOOD, History, fast, healthy, learning, render, write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def rows(losses, val=(), speed=lambda i: 1000.0, **more):
    """Of steps 1, 2, ...; `val`: {step: loss}."""
    found = []
    for i, loss in enumerate(losses, 1):
        row = {"train/loss": loss, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100 * i, "watchdog/skipped": 0} | more
        row |= {"perf/tokens_per_s": speed(i), "perf/step_ms": 100.0, "perf/data_ms": 1.0}
        row |= {"val/loss": dict(val)[i]} if i in dict(val) else {}
        found.append({"step": i} | row)
    return found


def history(found, events=(), config=""):
    return History("a run", found, list(events), config)


FALLING = [5.5 - 0.04 * i for i in range(100)]


@pytest.mark.parametrize(
    ("losses", "val", "grade", "says"),
    [
        (FALLING, {50: 3.5, 100: 1.6}, GOOD, "Validation: 1.600 nats after step 100, as unsure as among 5.0"),
        (FALLING, {50: 1.5, 100: 1.6}, FAIR, "it was better, 1.500, after step 50"),
        (FALLING[::-1], {100: 6.0}, BAD, "no better than at the start"),
        (FALLING, {}, GOOD, "there was no validation"),
        ([5.0], {}, FAIR, "Too few steps"),
        ([5.5 - 1e-6 * i for i in range(100)], {100: 5.49}, FAIR, "a fall of less than 2%"),
        ([5.5 - 1e-6 * i for i in range(100)], {}, FAIR, "no validation. That is a fall of less than 2%"),
        (FALLING[:20] + [math.nan] * 80, {20: 4.7}, BAD, "Of the last 10 training losses most are not finite"),
        ([*FALLING, math.nan], {101: 1.6}, GOOD, "its best"),
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
        ([], {"numerics/weights/saturated_max": 0.002}, GOOD, "saturates most: 0.20% of its weights"),
        ([], {"numerics/weights/saturated_max": 0.02}, FAIR, "saturates most: 2.00% of its weights"),
        ([], {"numerics/activations/underflow_max": 0.1589}, GOOD, "underflows most: 15.89% of its activations"),
        ([], {"numerics/activation_gradients/underflow_max": 0.99}, BAD, "99.00% of its activation gradients"),
        ([], {"numerics/weight_gradients/underflow_max": 0.99}, GOOD, "No step was skipped"),  # in 32 bits
    ],
)
def test_whether_it_is_healthy(events, more, grade, says):
    answer = healthy(history(rows(FALLING * 2, **more), events))
    assert (answer.grade, says in answer.text) == (grade, True), answer


@pytest.mark.parametrize(
    ("precision", "grade"),
    [
        ("{forward: e4m3, scaling: propagate}", BAD),
        ("{forward: e4m3, scaling: delayed}", GOOD),
        ("{forward: null, scaling: none}", GOOD),
    ],
)
def test_underflow_that_is_an_upper_bound_is_not_held_against_a_run(precision, grade):
    found = rows(FALLING, **{"numerics/activations/underflow_max": 0.6})
    assert healthy(history(found, config=f"precision: {precision}")).grade == grade


@pytest.mark.parametrize(
    ("speed", "more", "grade", "says"),
    [
        (lambda i: 1000.0 + i % 2, {}, GOOD, "1k tokens/s, 100.0 ms a step; 1.0% of it waiting for data"),
        (lambda i: 1000.0 if i < 80 else 500.0, {}, FAIR, "It slowed down: 500 tokens/s"),
        (lambda i: 1000.0, {"perf/mfu": 0.4}, GOOD, "40.0% of what the devices can do"),
        (lambda i: 1000.0, {"perf/mfu": 0.005}, FAIR, "0.5% of what the devices can do"),
        (lambda i: 10000.0 if i % 3 else 100.0, {}, FAIR, "every tenth step is at 100 tokens/s or less"),
    ],
)
def test_whether_it_is_fast(speed, more, grade, says):
    answer = fast(history(rows(FALLING, speed=speed, **more)))
    assert (answer.grade, says in answer.text) == (grade, True), answer


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
    head = re.search("<p class=sub>(.*?)</p>", page)[1]
    assert says in head
    assert head.endswith("; model gpt2_nano; precision bf16")


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
    assert max(found["cards"]) < 450
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
