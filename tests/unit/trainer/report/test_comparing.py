"""Runs are compared: the best first, the keys that differ, and where the page goes."""

import json
import re

import pytest
import yaml

from trainer.cli.compare import Arguments, main, run_directories
from trainer.errors import UserError
from trainer.report.comparing import (
    differing_settings,
    overridden,
)
from trainer.report.history import History


def make_run(folder, loss, overrides="", *, facts=(), tokens=9, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": i, "tokens": i, "train/loss": 5.0 - i, "lr": 1e-3} for i in (1, 2)]
    rows[-1] |= {} if loss is None else {"val/loss": loss, "val/tokens": tokens}
    write_rows(folder, rows)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    final = {"validation digest": "a", "final validation tokens": tokens}
    facts = {"overrides": overrides} | final | dict(facts)
    text = "".join(f"{name}: {fact}\n" for name, fact in facts.items())
    (folder / "environment.txt").write_text(text)


def write_rows(folder, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)


@pytest.fixture
def sweep(tmp_path):
    """Twelve jobs, one of which stopped before its last validation, and one of which
    validated on another text, beside one that never started."""
    for i in range(12):
        lr, seed = (1e-4, 3e-4, 1e-3, 1e-2)[i // 3], i % 3
        make_run(
            tmp_path / "sweep" / str(i),
            abs(lr - 1e-3) * 100 + 3 + 0.01 * seed,
            f"optimizer.lr={lr} seed={seed} train.steps=2",
            facts={"validation digest": "b"} if i == 3 else {},
            seed=seed,
            optimizer={"lr": lr},
            train={"steps": 2},
        )
    log = tmp_path / "sweep" / "4" / "metrics.jsonl"
    first, last = map(json.loads, log.read_text().splitlines())
    for key in ("val/loss", "val/tokens"):
        first[key] = last.pop(key)
    write_rows(log.parent, [first, last])
    (tmp_path / "sweep" / "12").mkdir()
    return tmp_path / "sweep"


@pytest.fixture
def compare(capsys):
    """Print a comparison, without its page where `out` is "no"."""

    def compare(runs, out="no"):
        main(Arguments(str(runs), out))
        return capsys.readouterr().out

    return compare


def test_a_sweep_is_a_table_best_first_with_means_over_seeds_and_a_page(sweep, compare):
    table, rest = compare(sweep, None).split("\n\n")
    head, *rows = table.splitlines()
    assert head.split()[2:6] == ["optimizer.lr", "seed", "validation", "loss"]
    assert rows[0].split()[1:5] == ["ranked", "0.001", "0", "3"]
    names = [row.split()[0] for row in rows]
    assert (names[:3], names[-2:], len(names)) == (["6", "7", "8"], ["4", "3"], 12)
    best, *unranked, head, first, second, third, last, page = rest.splitlines()
    settings = "validation loss 3.0000; optimizer.lr=0.001; seed=0"
    assert best == f"best: {sweep}/6 ({settings})"
    assert [line.rpartition("/")[2] for line in unranked] == ["4", "3"]
    assert [row.split() for row in (first, second, third, last)] == [
        ["0.001", "3.0100", "0.0100", "3"],
        ["0.0001", "3.1000", "0.0100", "3"],
        ["0.01", "3.9100", "0.0100", "3"],
        # one has no loss: the mean of the rest would flatter its settings
        ["0.0003", "3.0900", "-", "1", "of", "2"],
    ]
    assert page == str(sweep / "compare.html")
    text = (sweep / "compare.html").read_text()
    assert best in text
    assert "Validation loss by optimizer.lr" in text
    assert '["0.0001","0.0003","0.001","0.01"]' in text
    assert "4 (not ranked)" in text


def test_runs_that_differ_in_more_than_the_seed_have_no_mean(sweep, compare):
    assert "over seeds" not in compare(f"{sweep}/0,{sweep}/4,{sweep}/8")
    last = compare(f"{sweep}/0,{sweep}/1").splitlines()[-1]
    assert last.split() == ["3.0950", "0.0071", "2"]
    for name, seed in (("4", 1), ("5", 2)):
        make_run(sweep / name, None, seed=seed)
    out = compare(f"{sweep}/4,{sweep}/5")
    assert "best: " not in out  # nothing was validated
    assert out.splitlines()[-1].split() == ["-", "-", "0", "of", "2"]


def test_settings_of_a_continued_run_are_those_of_its_configuration(tmp_path):
    """Its last start need not repeat an override or a group, and that it was continued
    is no difference."""
    text = {"source": "text", "paths": ["a.txt"]}
    hub = {"source": "hf", "name": "org/set"}
    for name, overrides, resume, data, fsdp in (
        ("a", "data=text parallel=fsdp tracker=jsonl optimizer.lr=0.1", {}, text, -1),
        ("b", "optimizer.lr=0.2", {"source": "../a"}, text, -1),
        ("c", "data=hf", {"source": "auto"}, hub, 1),
    ):
        settings = {"data": data, "parallel": {"fsdp": fsdp}, "resume": resume}
        make_run(tmp_path / name, 3.0, overrides, seed=0, **settings)
    a, b, c = (History.read(tmp_path / name, name) for name in "abc")
    assert overridden([a, b]) == {"optimizer.lr": ["0.1", "0.2"]}
    assert differing_settings([a, b]) == {}
    assert overridden([a, c])["data"] == ["text", "hf"]
    assert overridden([a, c])["parallel"] == ["fsdp", "-"]


def test_runs_are_directories_or_patterns_in_the_order_of_numbers(sweep, monkeypatch):
    monkeypatch.chdir(sweep.parent)
    for pattern in ("sweep/*", str(sweep)):
        names = [path.name for path in run_directories(pattern)]
        assert names == [str(i) for i in range(12)]
    assert run_directories(f"{sweep}/3,{sweep}/1") == [sweep / "3", sweep / "1"]
    # a directory whose name is a pattern is that directory
    (sweep / "1").rename(sweep / "lr[2]")
    runs = run_directories(f"{sweep}/lr[2],{sweep}/[34]")
    assert runs == [sweep / "lr[2]", sweep / "3", sweep / "4"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("3,{}/nowhere", "there is no directory .*nowhere "),
        ("1,{}/2", r"1 has no metrics\.jsonl with rows; .*tracker=jsonl"),
        ("[12]", r"found 0 runs .*, and 2 without one, which had tracker=none"),
        ("3,{}/3", "given twice"),
    ],
)
def test_directories_that_are_no_runs_are_refused(sweep, compare, runs, message):
    for name in ("1", "2"):
        (sweep / name / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=message):
        compare(f"{sweep}/{runs}".format(sweep))


LARGEST = "largest tried, {}; try larger"
BY_MEAN = "by the mean over seeds"
CHANCE = f"{BY_MEAN}, optimizer.lr=0.3 is the best; the best single run may be chance"


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([(0.1, 3.0), (0.2, 2.0), (10.0, 1.0)], [LARGEST.format(10.0)]),
        ([(1e-05, 1.0), (0.2, 2.0)], ["smallest tried, 1e-05; try smaller"]),
        ([(0.1, 3.0), (0.2, 1.0), (0.3, None)], []),  # it was tried
        # the best run is of 0.2, the best mean of 0.3
        (
            [(0.1, 3.0), (0.2, 1.5), (0.2, 3.0), (0.3, 1.6), (0.3, 1.7)],
            [CHANCE, LARGEST.format(0.3)],
        ),
    ],
)
def test_a_best_value_at_an_end_of_those_tried_or_by_chance_is_told(
    tmp_path, losses, told, compare
):
    for seed, (rate, loss) in enumerate(losses):
        overrides, settings = f"optimizer.lr={rate} seed={seed}", {"lr": rate}
        make_run(tmp_path / str(seed), loss, overrides, optimizer=settings, seed=seed)
    out = compare(tmp_path)
    lines = [x for x in out.splitlines() if x.startswith(("the best ", BY_MEAN))]
    lines = [line.removeprefix("the best optimizer.lr is the ") for line in lines]
    assert sorted(lines) == sorted(told)


@pytest.fixture
def compared(tmp_path, compare):
    def compared(**runs):
        """Return what is said of runs, each a loss, the step of its last validation,
        the tokens that it read, those that a final one reads, and data."""
        for name, (loss, step, tokens, final, data) in runs.items():
            facts = {"validation tokens": 100_000, "final validation tokens": final}
            settings = {"train": {"steps": 2}, "data": data}
            run_dir = tmp_path / name
            make_run(run_dir, loss, facts=facts, tokens=tokens, **settings)
            if step < 2:
                log = run_dir / "metrics.jsonl"
                first, last = map(json.loads, log.read_text().splitlines())
                first |= {"val/loss": loss, "val/tokens": tokens}
                if step == 1:
                    del last["val/loss"], last["val/tokens"]
                else:  # the run diverges afterwards
                    last["val/loss"] = "NaN"
                write_rows(run_dir, [first, last])
        out = compare(",".join(str(tmp_path / name) for name in runs))
        lines = [x for x in out.splitlines() if re.search(r"^best: |ranked: ", x)]
        return [line.replace(f"{tmp_path}/", "").split(" (")[0] for line in lines]

    return compared


def test_runs_that_read_less_of_the_validation_text_are_not_ranked(compared):
    def run(loss, tokens):
        return (loss, 2, tokens, tokens, {})

    a, b, c = run(3.0, 12_800), run(2.5, 12_800), run(2.0, 5_120)
    not_ranked = "validated on 5,120 tokens, not ranked: c"
    assert compared(a=a, b=b, c=c) == ["best: b", not_ranked]
    # All of the text, but for the part of a batch.
    complete = run(3.0, 99_840)
    assert compared(a=complete, b=run(2.5, 99_328)) == ["best: b"]
    # The end of the text may be of another kind.
    not_ranked = "validated on 98,304 tokens, not ranked: b"
    assert compared(a=complete, b=run(2.5, 98_304)) == [not_ranked]


@pytest.mark.parametrize("tokens", [256, 12_800])
def test_a_run_that_stopped_early_or_diverged_is_not_ranked_beside_finished_ones(
    compared, tokens
):
    not_ranked = "no final validation loss, not ranked: c"
    runs = {name: (loss, 2, 12_800, 12_800, {}) for name, loss in (("a", 3), ("b", 2))}
    c = (1.0, 1, tokens, 12_800, {})
    assert compared(**runs, c=c) == ["best: b", not_ranked]
    assert compared(c=c, d=(1.1, 1, tokens, 12_800, {})) == ["best: c"]
    # its best loss is not its last
    assert compared(**runs, c=(1.0, 0, 12_800, 12_800, {})) == ["best: b", not_ranked]


def test_a_mixture_in_other_shares_is_another_validation_text(compared):
    mix = {"source": "mix", "sources": ["easy.txt", "hard.txt"], "stages": None}
    losses = (("a", [1, 1]), ("b", [3, 1]), ("c", None), ("d", [2, 2]))
    runs = {
        name: (3.0 - i / 10, 2, 9, 9, mix | {"weights": weights})
        for i, (name, weights) in enumerate(losses)
    }
    assert compared(**runs) == ["best: d", "other validation text, not ranked: b"]
    # A later stage decides: every validation has the shares that a run ends with.
    stages = mix | {"weights": [3, 1], "stages": [[1, 1, 1]]}
    assert compared(**runs | {"b": (1.0, 2, 9, 9, stages)}) == ["best: b"]


def test_a_loss_without_first_tokens_is_not_ranked_beside_others(compared):
    runs = {
        name: (loss, 2, 9, 9, {"boundary_loss": boundary})
        for name, loss, boundary in (("a", 3, None), ("b", 2, True), ("c", 1, False))
    }
    not_ranked = "other validation text, not ranked: c"
    assert compared(**runs) == ["best: b", not_ranked]


def test_another_comparison_is_not_overwritten_unless_it_is_named(sweep, compare):
    def page_of(runs, out=None):
        return compare(runs, out).splitlines()[-1]

    all_runs, two_runs = str(sweep / "compare.html"), str(sweep / "compare-2.html")
    assert page_of(sweep) == all_runs
    assert page_of(f"{sweep}/1,{sweep}/2") == two_runs
    assert page_of(f"{sweep}/2,{sweep}/1") == two_runs  # the same runs
    assert page_of(sweep) == all_runs
    replaced = page_of(f"{sweep}/1,{sweep}/2", all_runs)
    assert replaced == f"{all_runs}, in place of the file of that name"
