"""Histories of runs, made up for the tests of verdicts and pages."""

from trainer.report.run_records import RunRecords

FP8 = (
    "precision: {forward: e4m3, backward: e5m2, weight_grad: e5m2, scaling: propagate}"
)


def rows(losses, val=(), speed=lambda i: 1000.0, **more):
    """Of steps 1, 2, ...; `val`: {step: loss}."""
    logged_rows = []
    for i, loss in enumerate(losses, 1):
        row = {
            "train/loss": loss,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens": 100 * i,
            "watchdog/skipped": 0,
        } | more
        row = {
            "perf/tokens_per_s": speed(i),
            "perf/step_ms": 100.0,
            "perf/data_ms": 1.0,
        } | row
        row |= {"val/loss": dict(val)[i]} if i in dict(val) else {}
        logged_rows.append({"step": i} | row)
    return logged_rows


def run_records(logged_rows, events=(), config="", numerics=None, **facts):
    return RunRecords(
        "a run",
        logged_rows,
        list(events),
        config,
        [(100, numerics)] if numerics else [],
        facts={"FP8 layers": "h.*.attn.* h.*.mlp.*"} | facts,
    )


FALLING = [5.5 - 0.04 * i for i in range(100)]


def tensor(kind="activations", layer="h.1.mlp.c_proj.in", **figures):
    """Figures of a tensor, as a row of numerics has them."""
    figures = {
        "exponent": 0.0,
        "underflow": 0.0,
        "saturated": 0.0,
        "rms": 1.0,
    } | figures
    return {
        f"numerics/{kind}/{layer}/{figure}": value for figure, value in figures.items()
    }
