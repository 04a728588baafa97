"""The report is one file that asks the network for nothing, and its figures are
right."""

import math
import re

import pytest
from run_records import FALLING, rows, run_records, tensor

from trainer.errors import UserError
from trainer.observe.records import encode_row, read_rows
from trainer.report.page import render, write_report
from trainer.report.run_records import EVENT_COLORS, RunRecords, color_of


@pytest.fixture
def run_dir(tmp_path):
    """A run with NaN, events, a picture, and text that HTML must not take for its
    own."""
    logged = rows([*FALLING, math.nan], {50: 3.5, 100: 1.6})
    lines = [
        encode_row(row["step"], {k: v for k, v in row.items() if k != "step"})
        for row in logged
    ]
    event = {"event": "step 40 skipped (<script>alert(1)</script>)"}
    lines.insert(40, encode_row(40, event))
    folder = tmp_path / "runs" / "a<b"
    (folder / "numerics").mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    (folder / "config.yaml").write_text("seed: 0\ndata: {name: '</pre><img src=x>'}\n")
    (folder / "environment.txt").write_text(
        "parameters: 1\nseen: <b>\n\nparameters: 2\n"
    )
    (folder / "numerics" / "weights.png").write_bytes(b"\x89PNG")
    return folder


def test_the_report_is_one_file_that_asks_the_network_for_nothing(run_dir):
    page = write_report(run_dir).read_text()
    # the library (two), its controls, the data of the charts: none of the run's records
    text, scripts = re.subn(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert scripts == 4
    assert not re.search(r" src=[\"']?http|<script[^>]* src", page)
    assert not re.search(r"https?:|<link|<script|url\(|@import", text)
    assert "data:image/png;base64,iVBORw==" in text
    assert "<img src=x>" not in text
    for title in ("Loss", "Learning rate", "Gradient norm", "Throughput"):
        assert f"<b>{title}</b>" in text
    assert "step 40 skipped (&lt;script&gt;" in text


def test_a_log_with_a_step_twice_is_refused(run_dir):
    log = run_dir / "metrics.jsonl"
    last = read_rows(log)[-1]["step"]
    with log.open("ab") as file:
        file.write(encode_row(last, {"val/loss": 0.5}))
    message = f"out of order: step {last} follows step {last}. Resume the run .*resume="
    with pytest.raises(UserError, match=message):
        RunRecords.read(run_dir)


def test_a_history_has_the_last_figures_of_every_layer_and_the_last_starts_facts(
    run_dir,
):
    figures = tensor(underflow=0.125)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(encode_row(200, {"train/loss": 1.0, "tokens": 9} | figures))
        file.write(encode_row(201, {"train/loss": 1.0, "tokens": 9}))
    run = RunRecords.read(run_dir)
    assert run.numerics == [(200, figures)]
    assert run.line("numerics/activations/underflow_max").ys == [0.125]
    assert run.facts == {"parameters": "2"}
    assert run.name == "a<b"
    (run_dir / "config.yaml").write_text("tracker: {name: lr/3}\n")
    assert RunRecords.read(run_dir).name == "lr/3"


HUNG = "no progress for 9 s, in step 101; ended; checkpoints: 50"


@pytest.mark.parametrize(
    ("steps", "events", "says"),
    [
        (100, [], "100 of 100 steps: finished"),
        (2000, [], "100 of 2,000 steps: not finished"),
        (2000, [(100, HUNG)], "steps: ended because it hung"),
        (100, [(40, HUNG)], "100 of 100 steps: finished"),
    ],
)
def test_the_head_says_how_it_ended(steps, events, says):
    run = run_records(rows(FALLING), events, f"train: {{steps: {steps}}}")
    page = render(run, pictures={}, sample="", environment="")
    first = re.search("<p class=sub>(.*?)</p>", page)[1]
    assert says in first
    assert first.endswith("; 10k tokens")


@pytest.mark.parametrize("phrase", EVENT_COLORS)
def test_each_kind_of_event_has_its_color(phrase):
    assert color_of(f"{phrase} within 60 s") == EVENT_COLORS[phrase]
