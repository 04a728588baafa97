"""The stability study: each figure by hand on made-up runs, and a short study of real
ones that can fail."""

import json
import math
from typing import NamedTuple

import pytest

from scripts.studies import stability, stable
from scripts.studies.stability import Arguments
from scripts.studies.stable import Run
from trainer.errors import UserError

TINY = "model.n_layer=1 model.n_head=1 model.d_model=16 model.context=16"


def ended(first=5.0, final=2.0, *, diverged=False):
    return Run(first, final, diverged, 0)


@pytest.mark.parametrize(
    ("curve", "stopped", "right"),
    [
        ([4.0, 3.0, 2.0], False, False),
        ([4.0, 2.0, 3.4], False, False),
        ([4.0, 2.0, 3.6], False, True),
        ([4.0, 2.0, math.nan], False, True),
        ([4.0, 2.0], True, True),
        ([5.1, 5.2, 5.1], False, True),
        ([], False, True),
    ],
)
def test_a_run_has_diverged_that_was_stopped_learnt_nothing_or_lost_half_of_it(
    curve, stopped, right
):
    assert stable.has_diverged(5.0, curve, stopped=stopped) == right


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (1, 1, 0.2065, 1)],
)
def test_wilsons_interval_is_that_of_the_tables(count, of, low, high):
    assert stable.wilson(count, of) == pytest.approx((low, high), abs=1e-4)


def test_sensitivity_is_the_mean_over_rates_of_the_clipped_loss_above_the_best():
    runs = [ended(final=2.5), ended(final=2.0), ended(final=math.inf, diverged=True)]
    assert stable.sensitivity(runs) == pytest.approx((0.5 + 0 + 3.0) / 3)


def test_the_table_has_the_largest_rate_below_all_divergences_and_pairs_sensitivities_by_seed():
    class Key(NamedTuple):
        lr: float
        item: str
        seed: int

    runs = {}
    for seed in (0, 1):
        for lr, base, other in (
            (1.0, 2.0, 2.1),
            (3.0, 1.9, 1.9),
            (10.0, 2.2, math.inf),
        ):
            runs[Key(lr, "fp32", seed)] = ended(final=base)
            runs[Key(lr, "sim", seed)] = ended(final=other, diverged=math.isinf(other))
    runs[Key(1.0, "sim", 2)] = ended()  # a seed that is not slow
    base, other = stable.figures(runs, "fp32", [1.0, 3.0, 10.0])
    assert (base.largest, other.largest) == (10.0, 3.0)
    assert (base.runs, base.diverged, other.runs, other.diverged) == (6, 0, 7, 2)
    assert base.sensitivity == pytest.approx(0.4 / 3)
    assert (other.seeds, other.sensitivity) == (2, pytest.approx((0.2 + 0 + 3.1) / 3))
    assert other.ratio == pytest.approx(3.3 / 0.4)
    assert stable.largest_stable({Key(3.0, "x", 0): ended()}, [1.0, 3.0]) is None
    text = stable.markdown([base, other], runs, "fp32", [1.0, 3.0, 10.0])
    assert "| sim | 7 | 2 | 8% to 64% |" in text
    assert (
        "| fp32 | 2.0000 (2.000 to 2.000) | 1.9000 (1.900 to 1.900) | 2.2000 (2.200 to"
        " 2.200) |" in text
    )
    assert text.rstrip().endswith("| 2 diverged |")


@pytest.mark.slow  # ten runs; studies that go on: test_parity.py
def test_a_short_study_tells_a_rate_that_trains_from_one_that_does_not_and_goes_on(
    tmp_path, capsys
):
    out = tmp_path / "out"
    args = Arguments(
        "fp32",
        seeds=1,
        lr="1,100000",
        steps=40,
        batch_tokens=64,
        evaluations=4,
        eval_batches=2,
        last=1,
        jobs=2,
        overrides=(
            f"{TINY} parallel.data=1 data.cache_dir={tmp_path}/data"
            f" compile_cache={tmp_path}/cache"
        ),
        out=str(out),
    )
    stability.main(args)
    assert "1 to go, about" in capsys.readouterr().out
    study = json.loads((out / "stability.json").read_text())
    (row,) = study["table"]
    assert (row["runs"], row["diverged"], row["largest"]) == (2, 1, 1.0)
    assert row["sensitivity"] > 0.1
    trained, lost = study["runs"]
    assert trained["final"] < trained["first"] - 0.5
    assert not trained["diverged"]
    assert lost["diverged"]
    assert "| fp32 | 2 | 1 |" in (out / "stability.md").read_text()
    assert not list(out.glob("*/*/*/checkpoints"))
    finished = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    stability.main(args)
    assert "2 of 2 runs are finished; 0 to go" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    with pytest.raises(UserError, match=r"steps=20 \(was 40\)"):
        stability.main(Arguments(**vars(args) | {"steps": 20}))


def test_a_run_has_figures_when_it_has_ended():
    rows = [{"step": s, "train/loss": 5.0 - 0.1 * s} for s in range(1, 11)] + [
        {"step": 10, "val/loss": 4.0}
    ]
    actual = stable.run_of(rows, steps=10, last=1, stopped=False)
    assert actual == Run(first=4.9, final=4.0, diverged=False, skipped=0)
    assert stable.run_of(rows[:-1], steps=10, last=1, stopped=False) is None
    assert stable.run_of(rows[:-1], steps=10, last=1, stopped=True).diverged
