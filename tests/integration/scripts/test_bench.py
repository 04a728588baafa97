import contextlib
import json
import math
import os
import re
import sys
from types import SimpleNamespace

import pytest

from scripts.bench import interleave
from scripts.bench.cases import Case, parse_case
from scripts.bench.compare import Comparison, Results, RunningCase, Settings
from scripts.bench.interleave import Failed, Worker
from scripts.bench.speed import ON_A_GPU, Arguments, compare
from trainer.errors import UserError


def test_figures_are_the_median_and_the_extremes_of_the_rounds():
    actual = interleave.figures([0.5, 0.1, 0.2], tokens=100)
    assert actual == {
        "tokens_per_s": 500,
        "tokens_per_s_min": 200,
        "tokens_per_s_max": 1000,
        "step_ms": 200,
    }


def test_contestants_take_turns_and_alternate_who_begins():
    turns = []

    def contestant(name, seconds):
        return lambda steps: turns.append((name, steps)) or seconds

    seconds = interleave.interleave(
        {"a": contestant("a", 2.0), "b": contestant("b", 4.0)}, rounds=2, steps=4
    )
    assert turns == [("b", 4), ("a", 4), ("a", 4), ("b", 4)]
    assert seconds == {"a": [0.5, 0.5], "b": [1.0, 1.0]}


def test_cases_are_read_and_wrong_ones_named():
    case = parse_case("gpt2_124m:bf16:batch=4:scan=true:logits=compute")
    assert case == Case("gpt2_124m", "bf16", 4, ("scan=true", "logits=compute"))
    assert case.name == "gpt2_124m bf16 B=4 scan=true logits=compute"
    assert case.spec(16).context == 16
    assert all(parse_case(text).batch == 8 for text in ON_A_GPU.split(","))
    for text, message in (
        ("gpt2_124m", "has no precision"),
        ("gpt2_125m:bf16", "did you mean 'gpt2_124m'"),
        ("gpt2_124m:bf17", "did you mean 'bf16'"),
        ("gpt2_124m:bf16:bach=2", "did you mean 'batch'"),
        ("gpt2_124m:bf16:batch=x", "whole number"),
        ("gpt2_124m:bf16:deterministic=yes", "deterministic=yes"),
        ("gpt2_124m:bf16:logits=bf16", "model.loss_logits"),
    ):
        with pytest.raises(UserError, match=message):
            parse_case(text)


def on_cpu(rounds=1, steps=1):
    return Settings(rounds, steps, 16, "cpu")


def run(texts, out, platform="cpu"):
    args = Arguments(
        texts,
        rounds=1,
        steps=1,
        sequence=16,
        platform=platform,
        out=str(out),
        compile_cache=os.environ["SCALIFY_TEST_CACHE"],
    )
    return compare(args)


def test_a_cpu_is_not_timed_in_place_of_a_gpu(capsys, tmp_path):
    actual = run("gpt2_nano:fp32:batch=1", tmp_path / "a.json", platform="gpu")
    assert actual.rows == {}
    assert re.search(r"FAILED, platform=gpu, but JAX has cpu", capsys.readouterr().out)


def test_figures_of_other_settings_are_not_mixed(tmp_path):
    out = tmp_path / "a.json"
    Results.open(str(out), on_cpu()).save()
    with pytest.raises(UserError, match="figures of other settings"):
        Results.open(str(out), on_cpu(rounds=3))


class Pretended:
    """A contest whose cases cost a set time, fail, or find no room beside another; who
    is alive is counted."""

    def __init__(self, monkeypatch, seconds, fails=(), no_room=()):
        self.alive, self.most, self.started = [], 0, []
        self.seconds, self.fails, self.no_room = seconds, fails, no_room
        monkeypatch.setattr(
            Comparison, "started", lambda comparison, case: self.start(case)
        )

    @contextlib.contextmanager
    def start(self, case):
        self.started.append(case.precision)
        if case.precision in self.fails:
            raise Failed("broken", ended=True)
        if case.precision in self.no_room and self.alive:
            raise Failed("RESOURCE_EXHAUSTED: too large", ended=False)
        self.alive.append(case.precision)
        self.most = max(self.most, len(self.alive))
        worker = SimpleNamespace(
            is_alive=True,
            ask=lambda message, seconds: {"seconds": self.seconds[case.precision]},
        )
        try:
            yield RunningCase(
                case, worker, {"device": "cpu", "compile_s": 0.0}, math.inf
            )
        finally:
            self.alive.remove(case.precision)


PRECISIONS = ("bf16", "fp32", "scalify_fp8", "fp8_current")
FOUR = ",".join(f"gpt2_nano:{name}" for name in PRECISIONS)
COSTS = dict(zip(PRECISIONS, (4.0, 8.0, 2.0, 1.0), strict=True))


def test_two_are_alive_at_most_and_all_are_compared_with_the_first(
    monkeypatch, tmp_path
):
    pretended = Pretended(monkeypatch, COSTS)
    rows = run(FOUR, tmp_path / "a.json").rows
    assert pretended.most == 2
    assert pretended.started == list(COSTS)
    assert [list(row["over"].values()) for row in rows.values()] == [
        [2.0, 0.5, 0.25],
        [0.5],
        [2.0],
        [4.0],
    ]
    run(FOUR, tmp_path / "a.json")  # what has figures is not timed again
    assert pretended.started == list(COSTS)


def test_one_that_finds_no_room_is_timed_by_itself_and_the_next_ones_go_on(
    monkeypatch, tmp_path
):
    pretended = Pretended(monkeypatch, COSTS, no_room=("fp32",))
    rows = run(FOUR, tmp_path / "a.json").rows
    assert [row["precision"] for row in rows.values()] == list(COSTS)
    assert rows["gpt2_nano fp32 B=8"]["over"] == {}
    assert rows["gpt2_nano fp8_current B=8"]["over"] == {
        "gpt2_nano scalify_fp8 B=8": 2.0
    }
    assert pretended.alive == []


def test_the_next_takes_the_place_of_a_first_that_fails(monkeypatch, tmp_path):
    Pretended(monkeypatch, COSTS, fails=("bf16",))
    actual = run(FOUR, tmp_path / "a.json")
    assert actual.failed == {"gpt2_nano bf16 B=8": "broken"}
    assert list(json.loads((tmp_path / "a.json").read_text())["failed"]) == list(
        actual.failed
    )
    assert list(actual.rows["gpt2_nano fp32 B=8"]["over"]) == [
        "gpt2_nano scalify_fp8 B=8",
        "gpt2_nano fp8_current B=8",
    ]


def test_a_worker_that_is_silent_is_ended():
    code = (
        "import sys, time; print('thinking', file=sys.stderr); sys.stdin.readline();"
        " time.sleep(60)"
    )
    with Worker([sys.executable, "-c", code]) as worker:
        with pytest.raises(Failed, match="no answer in 1 s"):
            worker.ask({}, 1)
        assert not worker.is_alive


def test_an_error_is_an_answer_and_the_worker_lives():
    code = (
        "from scripts.bench.interleave import serve; serve(lambda message: {'twice': 2 *"
        " message['x']})"
    )
    with Worker([sys.executable, "-c", code]) as worker:
        with pytest.raises(Failed, match="KeyError: 'x'"):
            worker.ask({})
        assert worker.ask({"x": 3}) == {"twice": 6}
