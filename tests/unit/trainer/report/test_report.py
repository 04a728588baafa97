"""The report answers rightly, is whole in one file, and a browser shows it."""

import json
import math
import re
import shutil
import subprocess
import sys

import pytest
from histories import FALLING, FP8, history, rows, tensor

from trainer.cli.compare import Arguments, main
from trainer.errors import UserError
from trainer.observe.records import encode_row, read_rows
from trainer.report.comparing import short_names
from trainer.report.history import History
from trainer.report.page import charts, render, write_report

BROWSER = next(
    filter(
        None,
        map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")),
    ),
    None,
)


def page_of(*given, **settings):
    return render(history(*given, **settings), pictures={}, sample="", environment="")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"step": 1, "tokens": 1, "results": [{"precision": "fp32", "loss": 1.0}]}',
    ],
)
def test_a_damaged_evaluation_is_named(run_dir, text):
    (run_dir / "evaluation.json").write_text(text)
    damaged = r"evaluation\.json is damaged \(.*\); remove it"
    with pytest.raises(UserError, match=damaged):
        write_report(run_dir)


def test_facts_that_are_damaged_or_old_are_left_out(run_dir):
    (run_dir / "environment.txt").write_text(
        "vocabulary: 0\ntext: a book\ntraining tokens: many\n"
    )
    assert (
        "a book (0 training tokens, read 0.0 times" in write_report(run_dir).read_text()
    )
    (run_dir / "environment.txt").write_bytes(b"\xff\n")
    assert "blind guessing" not in write_report(run_dir).read_text()


def test_figures_that_are_not_finite_do_not_stop_the_report(run_dir):
    figures = tensor(underflow=0.25, rms=math.nan) | tensor(
        "weights", "h.0.mlp.c_fc.kernel", underflow=math.nan
    )
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(encode_row(200, {"train/loss": math.nan, "tokens": 9} | figures))
    (run_dir / "config.yaml").write_text(FP8)
    (run_dir / "environment.txt").write_text("FP8 layers: *\n")
    assert "at most 25.00% of that tensor" in write_report(run_dir).read_text()


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
        (
            2000,
            [(100, "no progress for 9 s, in step 101; ended; checkpoints: 50")],
            "steps: ended because it hung",
        ),
        (
            100,
            [(40, "no progress for 9 s, in step 41; ended; checkpoints: 30")],
            "100 of 100 steps: finished",
        ),
        (None, [], "100 steps: unknown whether finished"),
    ],
)
def test_the_head_says_how_it_ended_and_what_it_was(steps, events, says):
    config = "model: {name: gpt2_nano}\nprecision: {name: bf16}\n" + (
        f"train: {{steps: {steps}}}" if steps else ""
    )
    page = page_of(rows(FALLING), events, config)
    first, second, third = re.findall("<p class=sub>(.*?)</p>", page)[:3]
    assert says in first
    assert first.endswith("; 10k tokens")
    assert (second, third) == ("model gpt2_nano", "precision bf16")


def test_the_head_says_what_was_trained_on_what():
    config = "model: {name: gpt2_nano}\nprecision: {name: bf16}\nseed: 3\n"
    facts = {
        "parameters": "842,496",
        "vocabulary": "256",
        "tokenizer": "byte",
        "training tokens": "4,000",
        "text": "a book",
        "validation tokens": "400",
        "arithmetic": "matmuls in bf16",
        "host": "2 CPU cores",
        "devices": "1 x cpu (cpu)",
    }
    page = page_of(rows(FALLING), config=config, **facts)
    assert re.findall("<p class=sub>(.*?)</p>", page)[1:3] == [
        (
            "model gpt2_nano, 842,496 parameters; a book (4,000 training tokens, read"
            " 2.5 times; 400 for validation; tokenizer byte, 256 ids); 1 x cpu (cpu), 2"
            " CPU cores; seed 3"
        ),
        "precision bf16: matmuls in bf16",
    ]


def chart_of(title, *given, **settings):
    """Return the chart of this title; None: the page has none."""
    shown = {chart.title: chart for chart in charts(history(*given, **settings))}
    return shown.get(title)


def test_what_underflow_takes_is_charted_as_a_share_of_the_rms_with_its_limit():
    given = {"config": FP8, "numerics": tensor(underflow=0.25)}
    chart = chart_of("Underflow", rows(FALLING), **given)
    worst, limit = chart.shown
    assert (worst.name, worst.xs, limit.ys) == ("activations", [100], (1.0, 1.0))
    assert worst.ys == pytest.approx([0.0488281], rel=1e-5)
    assert "upper bound, % of the tensor's RMS" in chart.unit


def test_the_gradient_norm_is_shown_with_the_limit_where_that_mattered():
    actual = rows(FALLING)
    actual[9]["grad_norm"] = 3.0
    for clip, is_shown in (("2.0", True), ("4.0", False), ("null", False)):
        config = f"optimizer: {{clip_norm: {clip}}}"
        chart = chart_of("Gradient norm", actual, config=config)
        assert ("which 1.0% of the steps had" in chart.unit) == is_shown
        assert (chart.shown[-1].name == "limit") == is_shown


@pytest.fixture
def run_dir(tmp_path):
    """Of a run with NaN, events, a picture, and what HTML must not take for its own."""
    actual = rows([*FALLING, float("nan")], {50: 3.5, 100: 1.6})
    lines = [
        encode_row(row["step"], {k: v for k, v in row.items() if k != "step"})
        for row in actual
    ]
    lines.insert(
        40, encode_row(40, {"event": "step 40 skipped (<script>alert(1)</script>)"})
    )
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
    whole = write_report(run_dir).read_text()
    # the library (two), its controls, the data of the charts: none of the run's records
    text, scripts = re.subn(r"<script.*?</script>", "", whole, flags=re.DOTALL)
    assert scripts == 4
    assert not re.search(r" src=[\"']?http|<script[^>]* src", whole)
    assert not re.search(r"https?:|<link|<script|url\(|@import", text)
    assert "data:image/png;base64,iVBORw==" in text
    assert "<img src=x>" not in text
    for title in (
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Throughput",
    ):
        assert f"<b>{title}</b>" in text
    assert "not recorded" not in text
    assert "step 40 skipped (&lt;script&gt;" in text


def test_a_history_has_the_last_figures_of_every_layer_and_the_last_starts_facts(
    run_dir,
):
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(
            encode_row(200, {"train/loss": 1.0, "tokens": 9} | tensor(underflow=0.125))
        )
        file.write(encode_row(201, {"train/loss": 1.0, "tokens": 9}))
    actual = History.read(run_dir)
    assert actual.numerics == [(200, tensor(underflow=0.125))]
    assert actual.line("numerics/activations/underflow_max").ys == [0.125]
    assert actual.facts == {"parameters": "2"}


def test_a_missing_package_is_named_and_not_a_record(run_dir, monkeypatch):
    monkeypatch.delitem(sys.modules, "trainer.report.interactive", raising=False)
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    with pytest.raises(UserError, match=r"pip install --upgrade bokeh$") as error:
        write_report(run_dir)
    assert "damaged" not in str(error.value)


def test_a_directory_without_a_log_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        write_report(tmp_path)


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_a_browser_shows_it(run_dir, tmp_path):
    """What the page is after layout: every chart has a size, and the three answers are
    on the first screen."""
    page = write_report(run_dir)
    probe = """<script>addEventListener('load', () => setTimeout(() => {
      const box = e => e.getBoundingClientRect(), plots = Bokeh.documents.flatMap(doc => doc.roots());
      const tokens = () => plots.map(plot => Math.max(...plot.renderers[0].data_source.data.x));
      const before = tokens(); showX('tokens'); showLog(true);
      document.body.dataset.found = JSON.stringify({
      charts: [...document.querySelectorAll('figure > div > *')].map(e => box(e).height),
      before, tokens: tokens(),
      scales: plots.map(plot => plot.y_scale.type),
      cards: [...document.querySelectorAll('.card')].map(e => box(e).bottom),
      wide: document.body.scrollWidth})}, 1000))</script>"""
    copy = tmp_path / "probe.html"
    copy.write_text(page.read_text().replace("</head>", probe + "</head>"))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1240,900",
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path}/p",
    ]
    done = subprocess.run(
        [BROWSER, *flags, "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    actual = json.loads(
        re.search(r'data-found="([^"]*)"', done.stdout)[1].replace("&quot;", '"')
    )
    # loss, learning rate, gradient norm, throughput: no memory, no numerics recorded
    assert len(actual["charts"]) == 4
    assert all(100 < height < 400 for height in actual["charts"])
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert actual["before"] == [last["step"]] * 4
    assert actual["tokens"] == [last["tokens"]] * 4 != actual["before"]
    assert actual["scales"].count("LogScale") == 4
    assert len(actual["cards"]) == 3
    assert max(actual["cards"]) < 500
    assert actual["wide"] <= 1240


def test_runs_are_compared_in_a_table_that_names_what_differs(
    run_dir, tmp_path, monkeypatch, capsys
):
    with (run_dir / "environment.txt").open("a") as file:
        file.write("validation digest: a\n")
    other = tmp_path / "runs" / "c"
    shutil.copytree(run_dir, other)
    (other / "config.yaml").write_text("seed: 1\ndata: {name: '</pre><img src=x>'}\n")
    monkeypatch.chdir(tmp_path)
    main(Arguments("runs/*", "out.html"))
    printed = capsys.readouterr().out
    assert re.search(r"^seed +0 +1$", printed, re.MULTILINE)
    assert "data.name" not in printed
    assert re.search(
        r"^best loss on train\.eval_batches +1\.6 +1\.6$", printed, re.MULTILINE
    )
    assert "Training loss" in (tmp_path / "out.html").read_text()


def test_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart(tmp_path):
    assert short_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == [
        "a/run",
        "b/run",
    ]
    with pytest.raises(UserError, match="given twice"):
        short_names([tmp_path, tmp_path])


def test_a_chart_of_each_sharpness_only_where_it_was_measured():
    actual, edge = rows(FALLING), "Learning rate / critical learning rate"
    assert chart_of("Sharpness of the logits", actual) is None
    assert chart_of(edge, actual) is None
    actual[49] |= {"sharpness/logits": 0.07, "sharpness/critical": 500.0}
    assert chart_of("Sharpness of the logits", actual).shown[0].ys == [0.07]
    # a rate of 1e-3 where the critical one is 2 / 500
    ratio, limit = chart_of(edge, actual).shown
    assert (ratio.xs, ratio.ys, limit.ys) == ([50], [0.25], (1.0, 1.0))


def test_lines_that_are_flat_by_design_have_no_chart():
    figures = {"underflow_max": 0.5, "saturated_max": 0.0, "exponent_max": 0.0}
    actual = rows(FALLING)
    actual[49] |= {f"numerics/weights/{name}": x for name, x in figures.items()}
    for form, count in (("fp32", 0), ("fp16", 2)):
        shown = charts(history(actual, config=f"precision: {{compute: {form}}}"))
        titles = {"Underflow", "Saturation", "Scales"} & {x.title for x in shown}
        assert titles == set(["Underflow", "Saturation"][:count])
        assert [x.limit for x in shown if x.title == "Saturation"] == [1.0][:count]


def test_a_log_with_a_step_twice_is_refused(run_dir):
    log = run_dir / "metrics.jsonl"
    last = read_rows(log)[-1]["step"]
    with log.open("ab") as file:
        file.write(encode_row(last, {"val/loss": 0.5}))
    with pytest.raises(
        UserError, match=rf"a row of step {last} after that of step {last}, which no"
    ):
        History.read(run_dir)


@pytest.mark.parametrize("text", ["", "a: [", "- a"])
def test_a_configuration_that_cannot_be_read_is_refused(run_dir, text):
    (run_dir / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml.*; restore it"):
        History.read(run_dir)
