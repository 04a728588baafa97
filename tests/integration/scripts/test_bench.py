"""The comparison of speeds: what its cases say, who takes turns, and its figures."""

import contextlib
import math
import os
from types import SimpleNamespace

import pytest

from scripts.bench import interleave
from scripts.bench.cases import Case, parse_case
from scripts.bench.compare import Comparison, RunningCase
from scripts.bench.speed import ON_A_GPU, Arguments, compare
from trainer.errors import UserError


def test_cases_are_read_and_wrong_ones_are_named():
    case = parse_case("gpt2_124m:bf16:batch=4:scan=true")
    assert case == Case("gpt2_124m", "bf16", 4, ("scan=true",))
    assert all(parse_case(text).batch == 8 for text in ON_A_GPU.split(","))
    with pytest.raises(UserError, match="did you mean 'batch'"):
        parse_case("gpt2_124m:bf16:bach=2")


def test_cases_take_turns_and_all_are_compared_with_the_first(monkeypatch, tmp_path):
    seconds = {"bf16": 4.0, "fp32": 8.0, "scalify_fp8": 2.0}
    started = []

    @contextlib.contextmanager
    def start(comparison, case):
        started.append(case.precision)
        answer = {"seconds": seconds[case.precision]}
        worker = SimpleNamespace(is_alive=True, ask=lambda message, limit: answer)
        first = {"device": "cpu", "compile_s": 0.0}
        yield RunningCase(case, worker, first, math.inf)

    monkeypatch.setattr(Comparison, "started", start)
    texts = ",".join(f"gpt2_nano:{name}" for name in seconds)
    out = str(tmp_path / "a.json")
    arguments = Arguments(texts, rounds=1, steps=1, sequence=16, out=out)
    for _ in range(2):  # what has figures is not timed again
        rows = compare(arguments).rows
        assert started == list(seconds)
    over = [list(row["over"].values()) for row in rows.values()]
    assert over == [[2.0, 0.5], [0.5], [2.0]]
    figures = interleave.figures([0.5, 0.1, 0.2], tokens=100)
    assert figures["tokens_per_s"] == 500
    assert figures["step_ms"] == 200


def test_a_cpu_is_not_timed_in_place_of_a_gpu(capsys):
    arguments = Arguments(
        "gpt2_nano:fp32:batch=1",
        rounds=1,
        steps=1,
        sequence=16,
        platform="gpu",
        compile_cache=os.environ["SCALIFY_TEST_CACHE"],
    )
    assert compare(arguments).rows == {}
    assert "FAILED, platform=gpu, but JAX has cpu" in capsys.readouterr().out
