"""Runs beside each other, however many: the best first, what was varied, and where the
page goes."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import yaml

from trainer.cli.compare import Arguments, main, run_directories
from trainer.errors import UserError
from trainer.report.charts import Choice, ChoiceChart, color_number
from trainer.report.comparing import (
    RANKED,
    Entry,
    differing_settings,
    fitted,
    overridden,
    uneven_validations,
)
from trainer.report.history import History
from trainer.report.interactive import plot_choices


def make_run(folder, loss, overrides, *, facts=(), tokens=9, **settings):
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
        loss = abs(lr - 1e-3) * 100 + 3 + 0.01 * seed
        overrides = f"optimizer.lr={lr} seed={seed} train.steps=2"
        make_run(
            tmp_path / "sweep" / str(i),
            loss,
            overrides,
            facts={"validation digest": "b"} if i == 3 else {},
            seed=seed,
            optimizer={"lr": lr},
            train={"steps": 2},
            run_dir=f"s/{i}",
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


def test_a_sweep_is_a_table_best_first_with_means_over_seeds_and_a_picture_of_each_key(
    sweep, compare, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    table, rest = compare(sweep, None).split("\n\n")
    head, *rows = table.splitlines()
    columns = ["validation", "text", "optimizer.lr", "seed", "validation", "loss"]
    assert head.split()[:6] == columns
    assert [row.split()[0] for row in rows][:3] == ["6", "7", "8"]
    assert rows[0].split()[1:5] == ["ranked", "0.001", "0", "3"]
    assert [row.split()[0] for row in rows][-2:] == ["4", "3"]
    assert len(rows) == 12
    best, *unranked, head, means_of, third, fourth, fifth, where = rest.splitlines()
    assert [line.rpartition("/")[2] for line in unranked] == ["4", "3"]
    means = [means_of, third, fourth, fifth]
    settings = "validation loss 3.0000; optimizer.lr=0.001; seed=0"
    assert best == f"best: {sweep}/6 ({settings})"
    assert head.split("  ")[0] == "optimizer.lr"
    assert [row.split() for row in means] == [
        ["0.001", "3.0100", "0.0100", "3"],
        ["0.0001", "3.1000", "0.0100", "3"],
        ["0.01", "3.9100", "0.0100", "3"],
        # one has no loss: the one that is left proves nothing
        ["0.0003", "3.0900", "-", "1", "of", "2"],
    ]
    assert where == str(sweep / "compare.html")
    text = (sweep / "compare.html").read_text()
    assert best in text
    assert "mean validation loss over seeds" in text
    assert "Validation loss by optimizer.lr" in text
    assert '["0.0001","0.0003","0.001","0.01"]' in text
    assert not list(tmp_path.glob("*.html"))  # where the command was given


def test_runs_that_differ_in_more_than_the_seed_have_no_mean(sweep, compare):
    out = compare(f"{sweep}/0,{sweep}/4,{sweep}/8")
    assert "best: " in out
    assert "over seeds" not in out
    last = compare(f"{sweep}/0,{sweep}/1").splitlines()[-1]
    assert last.split() == ["3.0950", "0.0071", "2"]
    for name, seed in (("4", 1), ("5", 2)):
        make_run(sweep / name, None, "", seed=seed)
    out = compare(f"{sweep}/4,{sweep}/5")
    assert "best: " not in out  # nothing was validated
    assert out.splitlines()[-1].split() == ["-", "-", "0", "of", "2"]


def test_a_run_that_was_continued_keeps_the_settings_of_its_first_start(sweep):
    """Its last start had other overrides; what it was trained with stands in its
    configuration."""
    make_run(
        sweep / "6",
        3.0,
        "train.steps=4 resume.source=auto",
        seed=0,
        optimizer={"lr": 1e-3},
        run_dir="s/6",
    )
    actual = overridden([History.read(sweep / name, name) for name in ("6", "3")])
    assert actual["optimizer.lr"] == ["0.001", "0.0003"]
    assert "seed" not in actual  # which is the same
    assert actual["train.steps"] == ["4", "2"]


def test_runs_are_directories_or_patterns_in_the_order_of_numbers(sweep, monkeypatch):
    monkeypatch.chdir(sweep.parent)
    for pattern in ("sweep/*", f"{sweep}/*"):
        assert [path.name for path in run_directories(pattern)] == [
            *map(str, range(12))
        ]
    assert run_directories(f"{sweep}/3,{sweep}/1") == [sweep / "3", sweep / "1"]
    # a directory whose name is a pattern is that directory
    (sweep / "1").rename(sweep / "lr[2]")
    runs = run_directories(f"{sweep}/lr[2],{sweep}/[34]")
    assert runs == [sweep / "lr[2]", sweep / "3", sweep / "4"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("none*", "found 0 runs"),
        ("3,{}/nowhere", "there is no directory .*nowhere "),
        ("nowhere", "there is no directory .*nowhere "),
        ("1,{}/2", r"1 has no metrics\.jsonl with rows; .*tracker=jsonl"),
        ("[12]", r"found 0 runs .*, and 2 without one, which had tracker=none"),
    ],
)
def test_what_are_no_runs_is_refused(sweep, compare, runs, message):
    for name in ("1", "2"):
        (sweep / name / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=message):
        compare(f"{sweep}/{runs}".format(sweep))


def test_a_run_is_called_what_it_was_called(sweep):
    make_run(sweep / "named", 3.0, "", tracker={"name": "sweep/3 optimizer.lr=0.001"})
    assert History.read(sweep / "named").name == "sweep/3 optimizer.lr=0.001"
    assert History.read(sweep / "named", "given").name == "given"
    assert History.read(sweep / "0").name == "0"


def test_colours_do_not_run_out():
    assert len({color_number(i) for i in range(40)}) == 40


def test_a_line_joins_the_lowest_values_of_the_choices_that_have_one():
    values = [("a", 2.0), ("a", 1.0), ("b", math.inf), ("c", 3.0)]
    points = [Choice(choice, y, f"{choice} {y}", "g") for choice, y in values]
    line, dots = plot_choices(ChoiceChart("t", ["c", "b", "a"], points)).renderers
    assert line.data_source.data == {"x": ["c", "a"], "y": [3.0, 1.0]}
    assert dots.data_source.data["text"] == ["a 2.0", "a 1.0", "c 3.0"]


def test_what_a_continued_run_does_not_repeat_is_what_its_configuration_says(tmp_path):
    """Neither that it was continued, nor a group whose choice it does not name again,
    is a difference."""
    data = {"source": "text", "paths": ["a.txt"], "name": None}
    make_run(
        tmp_path / "a",
        3.0,
        "data=text parallel=fsdp tracker=jsonl optimizer.lr=0.1",
        data=data,
        parallel={"fsdp": -1},
        tracker={"kind": "jsonl", "name": "run a"},
    )
    settings = {"data": data, "parallel": {"fsdp": -1}, "resume": {"source": "../a"}}
    make_run(tmp_path / "b", 3.0, "resume.source=../a optimizer.lr=0.2", **settings)
    other = {"source": "hf", "name": "org/set", "paths": []}
    make_run(
        tmp_path / "c",
        3.0,
        "data=hf",
        data=other,
        parallel={"fsdp": 1},
        resume={"source": "auto"},
    )
    a, b, c = (History.read(tmp_path / name, name) for name in "abc")
    assert overridden([a, b]) == {"optimizer.lr": ["0.1", "0.2"]}
    assert differing_settings([a, b]) == {}
    assert overridden([a, c])["data"] == ["text", "hf"]
    assert "parallel" in overridden([a, c])


def rates(tmp_path, losses):
    for name, (rate, loss) in enumerate(losses):
        make_run(
            tmp_path / str(name),
            loss,
            f"optimizer.lr={rate} seed={name}",
            optimizer={"lr": rate},
            seed=name,
        )
    return str(tmp_path)


LARGEST, MEAN = "largest tried, {}; try larger", "by the mean over seeds"
CHANCE = f"{MEAN}, optimizer.lr=0.3 is the best; the best single run may be chance"


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([(0.1, 3.0), (0.2, 2.0), (10.0, 1.0)], [LARGEST.format(10.0)]),
        ([(1e-05, 1.0), (0.2, 2.0)], ["smallest tried, 1e-05; try smaller"]),
        ([(0.1, 3.0), (0.2, 1.0), (0.3, 2.0)], []),
        ([(0.1, 3.0), (0.2, 1.0), (0.3, None)], []),  # it was tried
        ([(0.1, None), (0.2, None)], []),
        ([("cosine", 1.0), ("linear", 2.0)], []),
        # the best run is of 0.2, the best mean of 0.3
        (
            [(0.1, 3.0), (0.2, 1.5), (0.2, 3.0), (0.3, 1.6), (0.3, 1.7)],
            [CHANCE, LARGEST.format(0.3)],
        ),
        (
            [(0.1, 3.0), (0.2, 1.5), (0.2, 3.0), (0.3, 1.6), (0.3, 1.4)],
            [LARGEST.format(0.3)],
        ),
    ],
)
def test_a_best_value_at_an_end_of_those_tried_or_by_chance_is_told(
    tmp_path, losses, told, compare
):
    out = compare(rates(tmp_path, losses), None if len(told) == 2 else "no")
    lines = [x for x in out.splitlines() if x.startswith(("the best ", MEAN))]
    lines = [line.removeprefix("the best optimizer.lr is the ") for line in lines]
    assert sorted(lines) == sorted(told)
    if len(told) == 2:
        page = (tmp_path / "compare.html").read_text()
        assert all(line in page for line in told)


@pytest.mark.parametrize("fork", [True, False])
def test_neither_a_fork_nor_a_longer_run_has_tried_values(tmp_path, compare, fork):
    for steps in (1, 2):
        settings = {"optimizer": {"lr": 0.1 * steps}}
        facts = {"forked from": "runs/a after step 80"} if fork else {}
        key = f"optimizer.lr={0.1 * steps}"
        if not fork:
            settings, key = {"train": {"steps": steps}}, f"train.steps={steps}"
        make_run(tmp_path / str(steps), 3.0 - steps, key, facts=facts, **settings)
    assert "try larger" not in compare(tmp_path)


def test_a_key_has_a_chart_and_advice_only_where_runs_differ_in_it_alone(
    tmp_path, compare
):
    for name, (lr, layers, loss) in enumerate(
        [(0.1, 2, 3.0), (0.2, 2, 2.5), (0.3, 4, 2.0), (0.4, 6, 4.0)]
    ):
        make_run(
            tmp_path / str(name),
            loss,
            f"optimizer.lr={lr} model.n_layer={layers} sample.max_new_tokens={name}",
            optimizer={"lr": lr},
            model={"n_layer": layers},
            sample={"max_new_tokens": name},
        )
    out, page = compare(tmp_path, None), (tmp_path / "compare.html").read_text()
    assert "the best " not in out  # no run differs from the best in one key
    assert "sample." not in out + page
    chart = page[page.index("Validation loss by optimizer.lr") :].split("</figure>")[0]
    assert '["0.1","0.2"]' in page  # those with two layers
    assert "model.n_layer=2" in chart
    assert "Validation loss by model.n_layer" not in page
    assert page.index("Training loss") < page.index("Validation loss by")


def test_runs_of_another_validation_text_are_marked_and_not_ranked(tmp_path, compare):
    for name, (loss, text) in enumerate([(3.0, "a"), (2.0, "a"), (1.0, "b")]):
        facts, settings = {"validation digest": text}, {"optimizer": {"lr": loss}}
        make_run(tmp_path / str(name), loss, "", facts=facts, **settings)
    out = compare(tmp_path, None)
    assert f"best: {tmp_path}/1 (" in out
    assert f"other validation text, not ranked: {tmp_path}/2" in out
    assert "2 (not ranked)" in (tmp_path / "compare.html").read_text()
    (tmp_path / "1" / "environment.txt").write_text("overrides: \n")
    with pytest.raises(UserError, match="the run 1 does not tell its validation text"):
        compare(tmp_path)


@pytest.fixture
def compared(tmp_path, compare):
    def compared(**runs):
        """What is said of runs, each a loss, the step of its last validation, the
        tokens that it read, those that a final one reads, and data."""
        for name, (loss, step, tokens, final, data) in runs.items():
            facts = {"validation tokens": 100_000, "final validation tokens": final}
            settings = {"train": {"steps": 2}, "data": data}
            run_dir = tmp_path / name
            make_run(run_dir, loss, "", facts=facts, tokens=tokens, **settings)
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
    assert compared(a=a, c=c) == [not_ranked]
    # All of the text, but for the part of a batch.
    whole = run(3.0, 99_840)
    assert compared(a=whole, b=run(2.5, 99_328)) == ["best: b"]
    # The end of the text may be of another kind.
    not_ranked = "validated on 98,304 tokens, not ranked: b"
    assert compared(a=whole, b=run(2.5, 98_304)) == [not_ranked]
    few, many = (
        Entry(SimpleNamespace(logged_validation_tokens={2: n}), RANKED, 1.0)
        for n in (99, 100)
    )
    assert "on 99 to 100 tokens" in uneven_validations([few, many])[0]
    assert uneven_validations([few, few]) == []


@pytest.mark.parametrize("tokens", [256, 12_800])
def test_a_run_that_stopped_early_or_diverged_is_not_ranked_beside_finished_ones(
    compared, tokens
):
    not_ranked = "no final validation loss, not ranked: c"
    runs = {name: (loss, 2, 12_800, 12_800, {}) for name, loss in (("a", 3), ("b", 2))}
    c = (1.0, 1, tokens, 12_800, {})
    assert compared(**runs, c=c) == ["best: b", not_ranked]
    assert compared(c=c, b=runs["b"])[0] == "best: b"
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


def test_a_table_of_text_is_not_wider_than_a_terminal():
    rows = [["", *(f"key {i}" for i in range(40))]]
    rows += [[f"run {n}", "x" * 300, *(["0.25"] * 39)] for n in range(3)]
    lines = fitted(rows)
    assert max(map(len, lines)) <= 120
    assert all(any(f"key {i}" in line for line in lines) for i in range(40))
    assert sum(line.startswith("run 2") for line in lines) == len(lines) / 4


def without_scripts(page):
    """The text of a page, without what Bokeh numbers anew at every call."""
    pattern = r"<script.*?</script>|<div id=.*?>"
    return re.sub(pattern, "", page.read_text(), flags=re.DOTALL)


def test_another_comparison_is_not_overwritten_unless_it_is_said(sweep, compare):
    def where(runs, out=None):
        return compare(runs, out).splitlines()[-1]

    assert where(str(sweep)) == str(sweep / "compare.html")
    first = without_scripts(sweep / "compare.html")
    assert where(f"{sweep}/1,{sweep}/2") == str(sweep / "compare-2.html")
    # the same runs
    assert where(f"{sweep}/2,{sweep}/1") == str(sweep / "compare-2.html")
    assert where(str(sweep)) == str(sweep / "compare.html")
    assert without_scripts(sweep / "compare.html") == first
    out = str(sweep / "compare.html")
    assert (
        where(f"{sweep}/1,{sweep}/2", out)
        == f"{out}, in place of the file of that name"
    )
