import json
import sys

import pytest

from scripts.bench import cases as bench_cases
from scripts.bench import racing
from scripts.bench import scalify as bench_scalify
from scripts.bench import speed as bench
from trainer.errors import UserError


def test_figures_are_the_median_and_the_extremes_of_the_rounds():
    found = racing.figures([0.5, 0.1, 0.2], tokens=100)
    assert found == {"tokens_per_s": 500, "tokens_per_s_min": 200, "tokens_per_s_max": 1000, "step_ms": 200}


def test_contestants_take_turns_and_alternate_who_begins():
    turns = []

    def contestant(name, seconds):
        return lambda steps: turns.append((name, steps)) or seconds

    seconds = racing.race({"a": contestant("a", 2.0), "b": contestant("b", 4.0)}, rounds=2, steps=4)
    assert turns == [("b", 4), ("a", 4), ("a", 4), ("b", 4)]
    assert seconds == {"a": [0.5, 0.5], "b": [1.0, 1.0]}


def test_absent_interpreter_is_named():
    with pytest.raises(UserError, match="torch_python=/nowhere/python does not exist"):
        racing.torch_interpreter("/nowhere/python")


def test_interpreter_without_torch_is_one_clear_error():
    args = bench.Arguments()
    with pytest.raises(UserError, match="ended without an answer"):
        bench.in_torch(args, 64, sys.executable)


def test_ours_alone_runs_at_any_size_and_writes_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "torch_interpreter", lambda named: None)
    out = tmp_path / "bench.json"
    bench.main(
        bench.Arguments(vocab="70", n_layer=1, n_head=1, d_model=8, context=8, batch=1, rounds=1, steps=1, out=str(out))
    )
    (row,) = json.loads(out.read_text())["results"]
    assert row["vocab"] == 70
    assert row["ours"]["tokens_per_s"] > 0


def test_ratios_are_of_the_rounds_and_speed_is_the_inverse_of_time(monkeypatch):
    assert bench_scalify.ratios([2.0, 3.0, 8.0], [1.0, 2.0, 2.0]) == {"median": 2.0, "min": 1.5, "max": 4.0}

    class Way:
        def __init__(self, seconds):
            self.trace = self.compile = lambda: seconds
            self.take = lambda steps: steps * seconds

    ways = {"plain": Way(2.0), "float16": Way(4.0)}
    monkeypatch.setattr(bench_scalify, "contestants", lambda *args: ways)
    found = bench_scalify.compare(None, 1, ("float16",), rounds=3, compiles=1, steps=5)
    assert found["plain"] == {"trace_s": 2.0, "compile_s": 2.0, "step_s": 2.0}
    assert found["float16"]["trace"]["median"] == found["float16"]["compile"]["median"] == 2.0
    assert found["float16"]["speed"]["median"] == 0.5


def test_the_scaled_step_races_the_plain_one_at_any_size(tmp_path, capsys):
    out = tmp_path / "bench.json"
    sizes = {"vocab": "70", "n_layer": 1, "n_head": 1, "d_model": 8, "context": 8, "batch": 1}
    bench.main(bench.Arguments(**sizes, scalify="float16", rounds=1, compiles=1, steps=1, out=str(out)))
    (row,) = json.loads(out.read_text())["results"]
    assert min(row["float16"][key]["median"] for key in ("trace", "compile", "speed")) > 0
    assert "scalify, float16 data, against plain: trace" in capsys.readouterr().out


def test_unknown_data_format_is_named():
    with pytest.raises(UserError, match="float8"):
        bench.main(bench.Arguments(scalify="float8"))


def test_cases_are_read_and_wrong_ones_named():
    case = bench_cases.parse_case("gpt2_124m:bf16:batch=4:scan=true")
    assert case == bench_cases.Case("gpt2_124m", "bf16", 4, "none", True)
    assert case.name == "gpt2_124m bf16 B=4 scan"
    assert all(bench_cases.parse_case(text).batch == 8 for text in bench.ON_A_GPU.split(","))
    for text, message in (
        ("gpt2_124m", "has no precision"),
        ("gpt2_125m:bf16", "did you mean 'gpt2_124m'"),
        ("gpt2_124m:bf17", "did you mean 'bf16'"),
        ("gpt2_124m:bf16:bach=2", "did you mean 'batch'"),
        ("gpt2_124m:bf16:batch=x", "whole number"),
    ):
        with pytest.raises(UserError, match=message):
            bench_cases.parse_case(text)


def test_cases_take_turns_and_are_compared(tmp_path, capsys, monkeypatch):
    """With nothing installed that is not needed."""
    for name in ("wandb", "datasets", "hydra", "tiktoken", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "cases.json"
    texts = "gpt2_nano:fp32:batch=1,gpt2_nano:bf16:batch=1,gpt2_nano:torch:batch=1"
    bench_cases.run_cases(texts, rounds=2, steps=1, minutes=9, context=16, python=None, out=str(out))
    rows = json.loads(out.read_text())["rows"]
    assert [row["precision"] for row in rows] == ["fp32", "bf16"]
    for row in rows:
        assert row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]
        assert min(row["peak_gib"], row["compile_s"]) > 0
        assert row["mfu"] is None  # a CPU has no known peak
    (first,), (second,) = (row["over"].values() for row in rows)
    assert first * second == pytest.approx(1, rel=0.5)  # medians of two rounds each
    printed = capsys.readouterr().out
    assert "gpt2_nano torch B=1: left out, no torch here" in printed
    assert "no picture: matplotlib is not installed" in printed


def test_no_case_is_begun_when_the_time_is_over(capsys):
    assert bench_cases.run_cases("gpt2_nano:fp32", rounds=1, steps=1, minutes=0, context=16, python=None, out="") == []
    assert "gpt2_nano fp32 B=8: left out, 0 minutes are over" in capsys.readouterr().out
