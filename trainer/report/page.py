"""report.html: one file, readable without network and without knowing the project.

It first answers three questions, each with a sentence and numbers: is the run learning,
healthy, fast?
"""

import base64
import html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.files import read_file, well_formed, write_text
from trainer.observe.display import short
from trainer.observe.records import read_samples
from trainer.report.charts import COLORS, Chart, Line, SweepChart, color_number
from trainer.report.run_records import RunRecords, color_of, read_text
from trainer.report.verdicts import (
    FP8_TENSORS,
    GRADE_LABELS,
    SATURATION_LIMITS,
    UNDERFLOW_LIMITS,
    QuantizationError,
    fast,
    healthy,
    is_low_precision,
    learning,
    quantization_errors,
)

# A reader cannot tell from one report whether its result is plausible.
ONE_RUN_NOTE = (
    "Only another run shows whether other settings do better: <code>scalify-trainer"
    " compare</code> compares runs. <code>scalify-trainer evaluate</code>"
    " measures the loss of the weights in other precisions."
)
LOGITS_SHARPNESS_UNIT = (
    "largest rise of the last tokens' loss, in %, when each logit changes by about"
    " 0.05%"
)
# Charts of a comparison: title, key and unit.
# Losses first: they decide which run is better.
COMPARED = (
    ("Training loss", "train/loss", "nats per token, lower is better"),
    ("Validation loss", "val/loss", "nats per token, lower is better"),
    ("Gradient norm", "grad_norm", "before clipping"),
    ("Throughput", "perf/tokens_per_s", "tokens per second"),
    ("Learning rate", "lr", ""),
    ("Memory", "memory/host_peak_gib", "GiB of the host"),
)
# A long run may have thousands; the newest ones explain how it ended.
MAX_EVENTS = 200  # of the table
# Single steps of these are noisy; the other curves are drawn as they are.
SMOOTHED = ("train/loss", "grad_norm", "perf/tokens_per_s")
# No font or style sheet from elsewhere: the page must read the same without a network.
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1b1f24;background:#fff;margin:0 auto;max-width:1200px;padding:20px}
h1{font-size:22px;margin:0} h2{font-size:17px;margin:26px 0 6px} p{margin:4px 0} small,.sub{color:#5b6570}
.cards,.charts{display:grid;gap:14px}
.cards{grid-template-columns:repeat(auto-fit,minmax(300px,1fr));margin:16px 0}
.charts{grid-template-columns:repeat(auto-fit,minmax(480px,1fr))}
.card{border:1px solid #d8dee4;border-left:7px solid;border-radius:6px;padding:10px 14px}
.card b{display:block;font-size:16px} .card i{font-style:normal;float:right;font-weight:600}
.good{border-left-color:#2e7d32} .good i{color:#2e7d32}
.fair{border-left-color:#e69f00} .fair i{color:#8a6000}
.card ul{margin:6px 0 0;padding-left:18px}
.unrated{border-left-color:#8c959f} .unrated i{color:#5b6570}
.bad{border-left-color:#b00020} .bad i{color:#b00020}
figure{margin:0;min-width:0;border:1px solid #e4e8ec;border-radius:6px;padding:8px 10px}
figcaption span{white-space:nowrap}
figcaption i{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 4px 0 10px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:3px 10px 3px 0;vertical-align:top;border-bottom:1px solid #eceff2}
td:first-child{white-space:nowrap}
td i{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:7px}
pre{background:#f6f8fa;padding:10px;overflow:auto;white-space:pre-wrap} img{max-width:100%}
"""


def ending(run: RunRecords) -> str:
    """Return `N of M steps: ending; tokens`.

    A run that was killed leaves no event, so it may also be still running.
    """
    # An event before the last row did not end the run, which was resumed.
    last = run.rows[-1]["step"]
    steps = run.settings.get("train.steps")
    events = [text for step, text in run.events if step >= last]
    if any(text.startswith("stopped: ") for text in events):
        how = "ended by the watchdog"
    # The text of `shutdown.Guard`, which ends a process that hangs or does not stop.
    elif any("; ended; checkpoints" in text for text in events):
        how = "ended because it hung"
    # A config.yaml that was cut may lack it; the page shows the rest.
    elif steps is None:
        how = "unknown whether finished"
    elif last >= steps:
        how = "finished"
    else:
        how = "not finished: stopped, or still running"
    total = "" if steps is None else f" of {steps:,}"
    return f"{last:,}{total} steps: {how}; {short(run.rows[-1]['tokens'])} tokens"


def subject(run: RunRecords) -> str:
    """Return model, text, devices and seed, as far as they are known."""
    settings, facts = run.settings, run.facts
    # Facts are missing where environment.txt is, or comes from an earlier version.
    size = f", {facts['parameters']} parameters" if "parameters" in facts else ""
    text = ""
    if "text" in facts:
        read = (
            f"{run.number('training tokens'):,} training tokens, read"
            f" {short(run.epochs)} times"
        )
        ids = (
            f"tokenizer {facts.get('tokenizer', '-')}, {run.number('vocabulary'):,} ids"
        )
        text = (
            f"{facts['text']} ({read}; {run.number('validation tokens'):,} for"
            f" validation; {ids})"
        )
    parts = [
        f"model {settings['model.name']}{size}" if "model.name" in settings else "",
        text,
        ", ".join(facts[key] for key in ("devices", "host") if key in facts),
        f"seed {settings['seed']}" if "seed" in settings else "",
        run.started_from,
    ]
    return "; ".join(filter(None, parts))


def arithmetic(run: RunRecords) -> str:
    """Return the precision and its meaning; empty where it is unknown."""
    name = run.settings.get("precision.name")
    meaning = run.facts.get("arithmetic")
    if not name:
        return ""
    # Names of presets say little: the line tells what is computed in which format.
    text = f"precision {name}: {meaning}" if meaning else f"precision {name}"
    # The facts are those of the last phase, and so are the numerics below.
    if run.earlier_precisions:
        earlier = ", then ".join(run.earlier_precisions)
        text += f"; this is the last phase; before it: {earlier}"
    return text


def charts(run: RunRecords) -> list[Chart]:
    """Return the charts of a run that have recorded values."""
    all_charts = [*training_charts(run), *numerics_charts(run)]
    return [
        # In every chart, so that a drop of speed and a spike of the loss can be laid
        # beside the event.
        replace(chart, event_marks=run.event_marks)
        for chart in all_charts
        if chart.shown
    ]


def training_charts(run: RunRecords) -> list[Chart]:
    """Return the charts of losses, rates, speed and memory."""
    clip_norm = run.settings.get("optimizer.clip_norm")
    norms = run.values("grad_norm")
    clipped_share = 0.0
    # At 0 clipping is off.
    if clip_norm and norms:
        clipped_share = sum(norm > clip_norm for norm in norms) / len(norms)
    norm_unit = "before clipping"
    if clipped_share:
        norm_unit += f"; {clipped_share:.1%} of the steps were clipped"
    return [
        Chart(
            "Loss",
            [
                *run.smooth("train/loss", "training"),
                run.line("val/loss", "validation", COLORS[1], dots=True),
            ],
            "nats per token, lower is better",
        ),
        Chart("Learning rate", [run.line("lr")], from_zero=True),
        Chart(
            "Gradient norm",
            run.smooth("grad_norm", "norm"),
            norm_unit,
            from_zero=True,
            # A limit above all norms would stretch the axis for nothing.
            limit=clip_norm if clipped_share else None,
        ),
        Chart(
            "Throughput",
            run.smooth("perf/tokens_per_s", ""),
            "tokens per second",
            from_zero=True,
        ),
        Chart(
            "Memory",
            [
                # CPUs do not report it: then the host's line is alone.
                run.line("memory/device_peak_gib", "device"),
                run.line("memory/host_peak_gib", "host", COLORS[1]),
            ],
            "GiB, peak so far",
            from_zero=True,
        ),
    ]


def numerics_charts(run: RunRecords) -> list[Chart]:
    """Return the charts of numerics and sharpness.

    Lines that are flat by design are left out: saturation and underflow in FP32, and
    scales that are all 1.
    """
    # The bound needs each tensor's RMS and format. Without them the share of values is
    # all that is known, and has no limit: a large share may be harmless.
    underflow = relative_underflow(run)
    underflow_unit = "upper bound, % of the tensor's RMS, worst layer"
    underflow_limit: float | None = 100 * UNDERFLOW_LIMITS[0]
    if not underflow:
        underflow = min_max_lines(run, "underflow", "max", factor=100)
        underflow_unit = "upper bound, % of the values, worst layer"
        underflow_limit = None
    scales = min_max_lines(run, "exponent", "max", "min")
    return [
        Chart(
            "Underflow",
            underflow,
            underflow_unit,
            from_zero=True,
            limit=underflow_limit,
        ),
        Chart(
            "Saturation",
            min_max_lines(run, "saturated", "max", factor=100),
            "% of the values cut off, worst layer",
            from_zero=True,
            limit=100 * SATURATION_LIMITS[0],
        ),
        Chart(
            "Sharpness of the logits",
            [run.line("sharpness/logits", dots=True)],
            LOGITS_SHARPNESS_UNIT,
            from_zero=True,
        ),
        Chart(
            "Learning rate / critical learning rate",
            [relative_learning_rate(run)],
            "at 1 or more, a step raises the loss of its own batch",
            from_zero=True,
            limit=1.0,
        ),
        Chart(
            "Scales",
            # Exponents of 0 are scales of 1: a method without scales.
            [line for line in scales if any(line.ys)],
            "powers of two, the largest and smallest of the layers",
        ),
    ]


def min_max_lines(
    run: RunRecords, statistic: str, *ends: str, factor: float = 1.0
) -> list[Line]:
    """Return lines of a statistic's extremes over the layers, for each tensor class.

    `ends`: `min` and `max`, or one of them; `factor` multiplies the values.
    """
    # FP32 loses nothing here, and rows of zeros would be drawn as flat lines.
    if run.settings.get("precision.compute") == "fp32" and not is_low_precision(
        run.settings
    ):
        return []
    lines = []
    # A class has one color in all charts.
    for kind, color in zip(FP8_TENSORS, COLORS, strict=False):
        for end in ends:
            key = f"numerics/{kind}/{statistic}_{end}"
            line = run.line(key, kind.replace("_", " "), color, dots=True)
            lines.append(replace(line, ys=[factor * y for y in line.ys]))
    return lines


def relative_underflow(run: RunRecords) -> list[Line]:
    """Return lines of the worst underflow, in percent of the tensor's RMS."""
    measured = [
        quantization_errors(numerics, run.settings, run.fp8_layers, "underflow")
        for _, numerics in run.numerics
    ]
    steps = [step for step, _ in run.numerics]
    no_error = QuantizationError(0.0, 0.0, "")
    lines = []
    for kind, color in zip(FP8_TENSORS, COLORS, strict=False):
        # A class may have no error in one measurement: zero there, not a gap.
        if any(kind in errors for errors in measured):
            percents = [
                100 * errors.get(kind, no_error).severity for errors in measured
            ]
            name = kind.replace("_", " ")
            lines.append(
                Line(name, steps, percents, color, dots=True, axes=run.step_axes)
            )
    return lines


def draw_charts(all_charts: Sequence[Chart | SweepChart]) -> list[str]:
    """Return the parts of a page that show charts."""
    # Bokeh takes a second to import.
    from trainer.report.interactive import chart_grid

    return chart_grid(all_charts)


def relative_learning_rate(run: RunRecords) -> Line:
    """Return the ratio of the learning rate to the critical one, where measured."""
    sharpness = run.line("sharpness/critical", dots=True)
    # Sharpness is measured at steps whose rows have the learning rate.
    rates = {row["step"]: float(row["lr"]) for row in run.rows if "lr" in row}
    # The recorded value is 2 over the critical rate.
    ratios = [
        rates[step] * value / 2
        for step, value in zip(sharpness.xs, sharpness.ys, strict=True)
    ]
    return replace(sharpness, ys=ratios)


def render(
    run: RunRecords, *, pictures: Mapping[str, bytes], sample: str, environment: str
) -> str:
    """Return the page. `pictures`: PNGs by title."""
    verdicts = {
        "Is it learning?": learning(run),
        "Is it healthy?": healthy(run),
        "Is it fast?": fast(run),
    }
    cards = ""
    # The color alone would not do: a grade has a text, for print and the color-blind.
    for question, verdict in verdicts.items():
        label = GRADE_LABELS[verdict.grade]
        cards += (
            f'<div class="card {verdict.grade}"><i>{label}</i><b>{question}</b>'
            f"{first_line_and_list(verdict.text)}</div>"
        )
    marked = " <small>dashed lines in the charts</small>" * bool(run.events)
    sections = [
        f"<h1>{html.escape(run.name)}</h1>",
        *(
            f"<p class=sub>{html.escape(line)}</p>"
            for line in (ending(run), subject(run), arithmetic(run))
            if line
        ),
        f'<div class="cards">{cards}</div>',
        f"<p class=sub>{ONE_RUN_NOTE}</p>",
        *draw_charts(charts(run)),
        f"<h2>Events{marked}</h2>{event_table(run.events)}",
    ]
    if sample:
        # Models, prompts and directories' names may hold `<`: every text is escaped
        # where it enters the page.
        prompt = html.escape(str(run.settings.get("sample.prompt", "")))
        sections.append(
            f"<h2>Last sample <small>continues: {prompt}</small></h2>{pre(sample)}"
        )
    for title, png in pictures.items():
        # Inside the page, because reports are sent around as one file.
        data = base64.b64encode(png).decode()
        image = f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'
        sections.append(folded(f"Numerics of every layer: {title}", image))
    # Folded and last: long, and needed only to repeat the run.
    sections.append(folded("Configuration", pre(run.config)))
    sections.append(folded("Environment", pre(environment)))
    return html_document(run.name, sections)


def pre(text: str) -> str:
    """Return preformatted text."""
    return f"<pre>{html.escape(text)}</pre>"


def folded(title: str, content: str) -> str:
    """Return a part of a page that a click on its title shows."""
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def comparison_page(
    runs: Sequence[RunRecords],
    table: Sequence[Sequence[str]],
    sweep_charts: Sequence[SweepChart],
    verdicts: Sequence[str],
    means: Sequence[Sequence[str]],
    unranked: Collection[str] = (),
) -> str:
    """Return a page that compares runs: verdicts, curves, sweep charts and tables.

    The first row of a table is its head. `means` may be empty. `unranked`: names of the
    runs whose losses cannot be compared.
    """
    names = {run.name: run.name for run in runs}
    # Their curves may lie below the best one, on an easier text.
    names |= {name: f"{name} (not ranked)" for name in unranked}

    def lines_of_runs(key: str) -> list[Line]:
        pairs = [(run, color_number(i)) for i, run in enumerate(runs)]
        # Only the median: faint raw lines of ten runs would hide each other.
        if key in SMOOTHED:
            return [run.smooth(key, names[run.name], color)[1] for run, color in pairs]
        is_validation = key.startswith("val/")
        return [
            run.line(key, names[run.name], c, dots=is_validation) for run, c in pairs
        ]

    curves = [
        # Losses have no use for zero on their axis, which would press them flat.
        Chart(title, lines_of_runs(key), unit, not key.endswith("loss"))
        for title, key, unit in COMPARED
    ]
    title = f"{len(runs)} runs"
    body = [f"<h1>{title}</h1>", *(f"<p>{html.escape(line)}</p>" for line in verdicts)]
    body += draw_charts([*curves, *sweep_charts])
    if means:
        body += ["<h2>Means over seeds</h2>", html_table(means)]
    body += ["<h2>Metrics and differing settings</h2>", html_table(table)]
    return html_document(title, body)


def html_table(table: Sequence[Sequence[str]]) -> str:
    """Return a table, whose first row is its head."""
    rows = ""
    for i, row in enumerate(table):
        tag = "td" if i else "th"
        cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        rows += f"<tr>{cells}</tr>"
    return f'<div class="wide"><table>{rows}</table></div>'


def first_line_and_list(text: str) -> str:
    """Return the first line as a sentence, the others as a list."""
    first, *rest = map(html.escape, text.splitlines())
    if not rest:
        return first
    return f"{first}<ul>{''.join(f'<li>{line}</li>' for line in rest)}</ul>"


def html_document(title: str, sections: Sequence[str]) -> str:
    """Return a whole document."""
    return (
        # The charset in the first bytes: a file has no header that tells it.
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def event_table(events: Sequence[tuple[int, str]]) -> str:
    """Return a table of the last events, the newest last."""
    if not events:
        return (
            "<p>None: nothing was skipped, rolled back or stalled, and no weight needed"
            " a new scale.</p>"
        )
    rows = "".join(
        f'<tr><td><i style="background:{color_of(text)}"></i>{step:,}</td>'
        f"<td>{html.escape(text)}</td></tr>"
        for step, text in events[-MAX_EVENTS:]
    )
    earlier = ""
    if len(events) > MAX_EVENTS:
        count = len(events) - MAX_EVENTS
        earlier = f"<p>{count} earlier events are in metrics.jsonl.</p>"
    return f"{earlier}<table><tr><th>step</th><th>event</th></tr>{rows}</table>"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` of a run directory, and return its path.

    Raises:
      UserError: no log, a malformed file, a link (whose target would be published), or
          a full disk.
    """
    # It refuses links, so that the files read below lie in the run's directory.
    run = RunRecords.read(run_dir)
    samples = read_samples(run_dir / "samples.txt")
    with well_formed(f"a record in {run_dir}", "repair or remove the file"):
        text = render(
            run,
            pictures={
                path.stem.replace("_", " "): read_file(path)
                # By name, because a directory lists its files in any order.
                for path in sorted((run_dir / "numerics").glob("*.png"))
            },
            sample=samples[-1].text if samples else "",
            environment=read_text(run_dir / "environment.txt"),
        )
    write_text(run_dir / "report.html", text)
    return run_dir / "report.html"
