"""Parity runs: what is asked for, what is run, and what is taken for its end."""

import re

import pytest

from scripts.studies import parity, runs
from scripts.studies.parity import Arguments
from trainer.errors import UserError
from trainer.observe.records import encode_row


def test_items_are_precisions_with_further_overrides_separated_by_commas():
    items, multiples = runs.parse(
        Arguments("a+precision.exclude=[h.0.*,h.1.*],bf16,fp32", lr="1,0.5")
    )
    assert items == ["fp32", "a+precision.exclude=[h.0.*,h.1.*]", "bf16"]
    assert multiples == [1.0, 0.5]
    assert runs.safe(items[1]) == "a+precision.exclude=_h.0.__h.1.__"
    assert runs.overrides("bf16") == ["precision=bf16"]
    assert runs.overrides("bf16+precision.mu=e4m3") == [
        "precision=bf16",
        "precision.mu=e4m3",
    ]
    assert runs.overrides("experiment=fishman+seed=1") == [
        "experiment=fishman",
        "seed=1",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"evaluations": 3}, "evaluations=3: expected a divisor of steps=1000"),
        ({"last": 21}, "not below last=21"),
        ({"lr": "0"}, "lr=0: expected positive multiples"),
        (
            {"overrides": "model.lr=1e-3 tracker=none"},
            "tracker=none: the study sets tracker itself; leave it out",
        ),
        ({"presets": "bf16+seed=3"}, "seed=3: the study sets seed itself"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        runs.parse(Arguments(**{"presets": "bf16"} | arguments))


def write(run_dir, *rows):
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_bytes(
        b"".join(encode_row(row.pop("step"), row) for row in rows)
    )


def test_a_run_has_ended_with_its_last_validation_or_where_it_was_stopped(tmp_path):
    write(
        tmp_path / "a",
        {"step": 5, "val/loss": 2.0, "watchdog/skipped": 1},
        {"step": 10, "watchdog/skipped": 1},
    )
    assert parity.read_outcome(tmp_path / "a", 10) is None
    assert parity.read_outcome(tmp_path / "never started", 10) is None
    assert parity.read_outcome(tmp_path / "a", 5) == ({5: 2.0}, 1, False, None)
    (tmp_path / "a" / "divergence.txt").touch()
    write(tmp_path / "b", {"step": 10, "val/loss": float("nan")})
    for name in "ab":
        actual = parity.read_outcome(tmp_path / name, 10)
        assert actual is not None
        assert actual.diverged
