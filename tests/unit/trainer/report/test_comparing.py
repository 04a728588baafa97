"""Runs beside each other, however many: the best first, what was varied, and where the
page goes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from trainer.cli.compare import Arguments, directories, main
from trainer.errors import UserError
from trainer.report.charts import Choice, by_choice, color_number
from trainer.report.comparing import (
    differences,
    fitted,
    overridden,
    uneven_validations,
)
from trainer.report.history import History


def make_run(folder, loss, overrides, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": i, "tokens": i, "train/loss": 5.0 - i, "lr": 1e-3} for i in (1, 2)]
    rows[-1] |= {} if loss is None else {"val/loss": loss}
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "environment.txt").write_text(f"overrides: {overrides}\n")


@pytest.fixture
def sweep(tmp_path):
    """Twelve jobs, one of which has no validation, beside one that never started."""
    for i in range(12):
        lr, seed = (1e-4, 3e-4, 1e-3, 1e-2)[i // 3], i % 3
        loss = None if i == 4 else abs(lr - 1e-3) * 100 + 3 + 0.01 * seed
        overrides = f"optimizer.lr={lr} seed={seed} train.steps=2"
        make_run(
            tmp_path / "sweep" / str(i),
            loss,
            overrides,
            seed=seed,
            optimizer={"lr": lr},
            run_dir=f"s/{i}",
        )
    (tmp_path / "sweep" / "12").mkdir()
    return tmp_path / "sweep"


def test_a_sweep_of_any_size_is_a_table_best_first_and_a_picture_of_each_key(
    sweep, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    main(Arguments(str(sweep)))
    table, rest = capsys.readouterr().out.split("\n\n")
    (head, *rows), where = table.splitlines(), rest.splitlines()[-1]
    assert head.split()[:4] == ["optimizer.lr", "seed", "validation", "loss"]
    assert [row.split()[0] for row in rows][:3] == ["6", "7", "8"]
    assert rows[0].split()[1:4] == ["0.001", "0", "3"]
    assert rows[-1].split()[0] == "4"
    assert len(rows) == 12
    assert where == str(sweep / "compare.html")
    text = (sweep / "compare.html").read_text()
    assert "Validation loss by optimizer.lr" in text
    assert (
        text.index(">0.0001</text>")
        < text.index(">0.0003</text>")
        < text.index(">0.01</text>")
    )
    assert not list(tmp_path.glob("*.html"))  # where the command was given


def test_the_best_run_is_named_and_each_setting_has_its_mean_over_seeds(sweep, capsys):
    main(Arguments(str(sweep)))
    best, head, *means, _ = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert (
        best == f"best: {sweep}/6 (validation loss 3.0000; optimizer.lr=0.001; seed=0)"
    )
    assert head.split("  ")[0] == "optimizer.lr"
    assert [row.split() for row in means] == [
        ["0.001", "3.0100", "0.0100", "3"],
        ["0.0001", "3.1000", "0.0100", "3"],
        ["0.01", "3.9100", "0.0100", "3"],
        # one has no loss: the two that are left prove nothing
        ["0.0003", "3.0800", "0.0141", "2", "of", "3"],
    ]
    text = (sweep / "compare.html").read_text()
    assert best in text
    assert "mean validation loss over seeds" in text


def test_runs_that_differ_in_more_than_the_seed_have_no_mean(sweep, capsys):
    main(Arguments(f"{sweep}/0,{sweep}/4,{sweep}/8", "no"))
    out = capsys.readouterr().out
    assert "best: " in out
    assert "over seeds" not in out
    main(Arguments(f"{sweep}/0,{sweep}/1", "no"))
    assert capsys.readouterr().out.splitlines()[-1].split() == ["3.0950", "0.0071", "2"]
    make_run(sweep / "4", None, "", seed=1)
    make_run(sweep / "5", None, "", seed=2)
    main(Arguments(f"{sweep}/4,{sweep}/5", "no"))
    out = capsys.readouterr().out
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


def test_a_group_is_called_by_its_choice_and_not_by_the_name_of_a_run(tmp_path):
    for name, precision in (("a", "fp32"), ("b", "bf16")):
        groups = {
            "tracker": {"kind": "jsonl", "name": f"run {name}"},
            "precision": {"name": precision},
        }
        make_run(
            tmp_path / name,
            3.0,
            f"tracker=jsonl precision={precision}",
            run_dir=name,
            **groups,
        )
    actual = overridden([History.read(tmp_path / name, name) for name in ("a", "b")])
    assert actual == {"precision": ["fp32", "bf16"]}


@pytest.mark.parametrize("relative", [True, False])
def test_patterns_may_be_absolute_and_numbers_are_in_their_order(
    sweep, relative, monkeypatch
):
    monkeypatch.chdir(sweep.parent)
    actual = directories("sweep/*" if relative else f"{sweep}/*")
    assert [path.name for path in actual] == [str(i) for i in range(12)]
    assert directories(f"{sweep}/3,{sweep}/1") == [sweep / "3", sweep / "1"]
    with pytest.raises(UserError, match="found 0 runs"):
        directories(str(sweep / "none*"))


def test_a_directory_whose_name_is_a_pattern_is_that_directory(sweep):
    (sweep / "1").rename(sweep / "lr[2]")
    runs = directories(f"{sweep}/lr[2],{sweep}/[34]")
    assert runs == [sweep / "lr[2]", sweep / "3", sweep / "4"]


def test_a_directory_that_is_not_there_is_said_not_to_be_there(sweep):
    for runs in (f"{sweep}/1,{sweep}/nowhere", f"{sweep}/nowhere"):
        with pytest.raises(UserError, match=r"there is no directory .*nowhere "):
            main(Arguments(runs, "no"))


def test_runs_without_a_log_are_told_which_trackers_write_one(sweep):
    for name in ("1", "2"):
        (sweep / name / "metrics.jsonl").unlink()
    with pytest.raises(
        UserError, match=r"1 has no metrics\.jsonl with rows; .*tracker=jsonl"
    ):
        main(Arguments(f"{sweep}/1,{sweep}/2", "no"))
    with pytest.raises(
        UserError, match=r"found 0 runs .*, and 2 without one, which had tracker=none"
    ):
        main(Arguments(f"{sweep}/[12]", "no"))


def test_a_run_is_called_what_it_was_called(sweep):
    make_run(sweep / "named", 3.0, "", tracker={"name": "sweep/3 optimizer.lr=0.001"})
    assert History.read(sweep / "named").name == "sweep/3 optimizer.lr=0.001"
    assert History.read(sweep / "named", "given").name == "given"
    assert History.read(sweep / "0").name == "0"


def test_colours_do_not_run_out():
    assert len({color_number(i) for i in range(40)}) == 40


def test_choices_without_a_value_are_said_to_have_none():
    assert "not recorded" in by_choice("t", ["a"], [Choice(0, float("inf"), "x")])
    assert by_choice("t", ["<a>"], [Choice(0, 1.0, "x")]).count("&lt;a&gt;") == 1


def test_what_a_continued_run_does_not_repeat_is_what_its_configuration_says(tmp_path):
    """Neither that it was continued, nor a group whose choice it does not name again,
    is a difference."""
    data = {"source": "text", "paths": ["a.txt"], "name": None}
    make_run(
        tmp_path / "a",
        3.0,
        "data=text parallel=fsdp optimizer.lr=0.1",
        data=data,
        parallel={"fsdp": -1},
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
    assert differences([a, b]) == {}
    assert overridden([a, c])["data"] == ["text", "hf"]
    assert "parallel" in overridden([a, c])


def rates(tmp_path, losses, key="lr"):
    for name, (rate, loss) in enumerate(losses):
        make_run(
            tmp_path / str(name),
            loss,
            f"optimizer.{key}={rate} seed={name}",
            optimizer={key: rate},
            seed=name,
        )
    return str(tmp_path)


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        (
            [(0.1, 3.0), (0.2, 2.0), (10.0, 1.0)],
            ["the best optimizer.lr is the largest tried, 10.0; try larger"],
        ),
        (
            [(1e-05, 1.0), (0.2, 2.0)],
            ["the best optimizer.lr is the smallest tried, 1e-05; try smaller"],
        ),
        ([(0.1, 3.0), (0.2, 1.0), (0.3, 2.0)], []),
        ([(0.1, 3.0), (0.2, 1.0), (0.3, None)], []),  # it was tried
        ([(0.1, None), (0.2, None)], []),
        ([("cosine", 1.0), ("linear", 2.0)], []),
        # the best run is of 0.2, the best mean of 0.3
        (
            [(0.1, 3.0), (0.2, 1.0), (0.2, 3.0), (0.3, 1.5), (0.3, 1.6)],
            ["the best optimizer.lr is the largest tried, 0.3; try larger"],
        ),
    ],
)
def test_a_best_value_at_an_end_of_those_tried_is_told(tmp_path, losses, told, capsys):
    main(Arguments(rates(tmp_path, losses)))
    assert [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("the best ")
    ] == told
    assert all(line in (tmp_path / "compare.html").read_text() for line in told)


def test_a_fork_beside_its_parent_has_tried_no_values(tmp_path, capsys):
    folder = rates(tmp_path, [(0.1, 3.0), (0.3, 2.0)])
    forked = next(path for path in Path(folder).glob("*/environment.txt"))
    forked.write_text(forked.read_text() + "forked from: runs/a after step 80\n")
    main(Arguments(folder, "no"))
    assert "try larger" not in capsys.readouterr().out


@pytest.mark.parametrize(("other", "is_told"), [(1.7, True), (1.4, False)])
def test_where_the_means_have_another_best_than_the_runs_it_is_told(
    tmp_path, other, is_told, capsys
):
    main(
        Arguments(
            rates(
                tmp_path, [(0.1, 3.0), (0.2, 1.5), (0.2, 3.0), (0.3, 1.6), (0.3, other)]
            ),
            "no",
        )
    )
    told = (
        "by the mean over seeds, optimizer.lr=0.3 is the best; the best single run may"
        " be chance"
    )
    assert (told in capsys.readouterr().out.splitlines()) == is_told


def test_a_key_has_a_chart_and_advice_only_where_runs_differ_in_it_alone(
    tmp_path, capsys
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
    main(Arguments(str(tmp_path)))
    out, page = capsys.readouterr().out, (tmp_path / "compare.html").read_text()
    assert "the best " not in out  # no run differs from the best in one key
    assert "sample." not in out + page
    chart = page[page.index("Validation loss by optimizer.lr") :].split("</figure>")[0]
    assert chart.count("<circle") == 2  # those with two layers
    assert "model.n_layer=2" in chart
    assert "Validation loss by model.n_layer" not in page
    assert page.index("Training loss") < page.index("Validation loss by")


def test_runs_of_another_validation_text_are_marked_and_not_ranked(tmp_path, capsys):
    for name, (rate, loss) in enumerate([(0.1, 3.0), (0.2, 2.0), (0.3, 1.0)]):
        make_run(tmp_path / str(name), loss, "", optimizer={"lr": rate})
    with (tmp_path / "2" / "environment.txt").open("a") as file:
        file.write("text: another book\ntokenizer: byte\nvalidation tokens: 9\n")
    main(Arguments(str(tmp_path)))
    out = capsys.readouterr().out
    assert f"best: {tmp_path}/1 (" in out
    assert f"other validation text, not ranked: {tmp_path}/2" in out
    assert "2 (not ranked)" in (tmp_path / "compare.html").read_text()


def test_a_validation_text_is_known_by_its_content(tmp_path, capsys):
    digests = ["a", "b", "b", ""]
    for name, digest in enumerate(digests):
        make_run(tmp_path / str(name), 3.0 - name, "", optimizer={"lr": 0.1 * name})
        with (tmp_path / str(name) / "environment.txt").open("a") as file:
            facts = "text: book.txt\ntokenizer: byte\nvalidation tokens: 9\n"
            file.write(facts + f"validation digest: {digest}\n" * bool(digest))
    main(Arguments(",".join(str(tmp_path / name) for name in "012")))
    out = capsys.readouterr().out
    assert f"other validation text, not ranked: {tmp_path}/0" in out
    # An earlier version wrote no digest.
    main(Arguments(",".join(str(tmp_path / name) for name in "0123")))
    assert "not ranked" not in capsys.readouterr().out


FACTS = "text: a book\ntokenizer: byte\nvalidation tokens: 100000\n"


def compared(folder, capsys, **runs):
    """What is said of runs, each a loss, the step of its last validation, settings."""
    for name, (loss, step, train, data) in runs.items():
        make_run(folder / name, loss, "", train={"steps": 2} | train, data=data)
        path = folder / name / "metrics.jsonl"
        first, last = map(json.loads, path.read_text().splitlines())
        if step == 1:
            first["val/loss"] = last.pop("val/loss")
        elif step == 0:  # the run diverges afterwards
            first["val/loss"], last["val/loss"] = loss, "NaN"
        path.write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
        with (folder / name / "environment.txt").open("a") as file:
            file.write(FACTS)
    main(Arguments(",".join(str(folder / name) for name in runs), "no"))
    out = capsys.readouterr().out
    return [line for line in out.splitlines() if re.search(r"^best: |ranked: ", line)]


def sizes(batch_tokens, batches, final_batches):
    return {
        "batch_tokens": batch_tokens,
        "eval_batches": batches,
        "final_eval_batches": final_batches,
    }


def test_runs_that_read_less_of_the_validation_text_are_not_ranked(tmp_path, capsys):
    more, less = sizes(256, 1, 50), sizes(256, 1, 20)
    losses = {"a": (3.0, 2, more, {}), "b": (2.5, 2, more, {}), "c": (2.0, 2, less, {})}
    assert compared(tmp_path, capsys, **losses) == [
        f"best: {tmp_path}/b (validation loss 2.5000)",
        f"validated on 5,120 tokens, not ranked: {tmp_path}/c",
    ]
    told = compared(tmp_path, capsys, a=losses["a"], c=losses["c"])
    assert told == [f"validated on 5,120 tokens, not ranked: {tmp_path}/c"]
    # Batches of another size that read as much, and all of the text.
    for batches in (13, 1000):
        few, many = sizes(1024, 1, batches), sizes(256, 1, 4 * batches)
        runs = {"a": (3.0, 2, many, {}), "b": (2.5, 2, few, {})}
        [told] = compared(tmp_path, capsys, **runs)
        assert told.startswith(f"best: {tmp_path}/b (")
    # The end of the text may be of another kind.
    runs["b"] = (2.5, 2, sizes(4096, 1, 1000), {})
    told = compared(tmp_path, capsys, **runs)
    assert told == [f"validated on 98,304 tokens, not ranked: {tmp_path}/b"]
    few, many = (SimpleNamespace(logged_validation_tokens={2: n}) for n in (99, 100))
    assert "on 99 to 100 tokens" in uneven_validations([few, many])[0]
    assert uneven_validations([few, few]) == []


def test_a_run_that_stopped_early_is_not_ranked_beside_finished_ones(tmp_path, capsys):
    short, equal = sizes(256, 1, 50), sizes(256, 50, 50)
    runs = {"a": (3.0, 2, short, {}), "b": (2.5, 2, short, {})}
    assert compared(tmp_path, capsys, **runs, c=(2.0, 1, short, {})) == [
        f"best: {tmp_path}/b (validation loss 2.5000)",
        f"no final validation loss, not ranked: {tmp_path}/c",
    ]
    told = compared(tmp_path, capsys, c=(2.0, 1, short, {}), b=runs["b"])
    assert told[0].startswith(f"best: {tmp_path}/b (")
    runs = {"a": (3.0, 2, equal, {}), "b": (2.5, 2, equal, {})}
    assert compared(tmp_path, capsys, **runs, c=(2.0, 1, equal, {})) == [
        f"best: {tmp_path}/b (validation loss 2.5000)",
        f"no final validation loss, not ranked: {tmp_path}/c",
    ]
    stopped = {"c": (2.0, 1, equal, {}), "d": (2.1, 1, equal, {})}
    told = compared(tmp_path, capsys, **stopped)
    assert told == [f"best: {tmp_path}/c (validation loss 2.0000)"]


def test_the_best_loss_of_a_run_that_diverged_is_not_its_last(tmp_path, capsys):
    every = sizes(256, 50, 50)
    runs = {"a": (3.0, 2, every, {}), "b": (2.5, 2, every, {})}
    assert compared(tmp_path, capsys, **runs, c=(2.0, 0, every, {})) == [
        f"best: {tmp_path}/b (validation loss 2.5000)",
        f"no final validation loss, not ranked: {tmp_path}/c",
    ]


def test_a_mixture_in_other_shares_is_another_validation_text(tmp_path, capsys):
    mix = {"source": "mix", "sources": ["easy.txt", "hard.txt"], "stages": None}
    losses = (("a", [1, 1]), ("b", [3, 1]), ("c", None), ("d", [2, 2]))
    runs = {
        name: (3.0 - i / 10, 2, {}, mix | {"weights": weights})
        for i, (name, weights) in enumerate(losses)
    }
    told = compared(tmp_path, capsys, **runs)
    assert told[0].startswith(f"best: {tmp_path}/d (")
    assert told[1:] == [f"other validation text, not ranked: {tmp_path}/b"]
    # A later stage decides: every validation has the shares that a run ends with.
    stages = mix | {"weights": [3, 1], "stages": [[1, 1, 1]]}
    runs["b"] = (1.0, 2, {}, stages)
    assert len(compared(tmp_path, capsys, **runs)) == 1


def test_a_loss_without_first_tokens_is_not_ranked_beside_others(tmp_path, capsys):
    for i, boundary in enumerate((None, True, False)):
        make_run(tmp_path / str(i), 3.0 - i, "", data={"boundary_loss": boundary})
    main(Arguments(str(tmp_path), "no"))
    out = capsys.readouterr().out
    assert f"best: {tmp_path}/1 (" in out
    assert f"other validation text, not ranked: {tmp_path}/2" in out


def test_a_mixture_of_an_earlier_version_was_validated_by_its_seed(tmp_path, capsys):
    mix = {"source": "mix", "sources": ["easy.txt", "hard.txt"]}
    for seed in (0, 1):
        make_run(tmp_path / str(seed), 2.0 + seed, "", seed=seed, data=mix)
    main(Arguments(str(tmp_path), "no"))
    assert "other validation text, not ranked" in capsys.readouterr().out
    for seed in (0, 1):
        path = tmp_path / str(seed) / "metrics.jsonl"
        path.write_text(
            path.read_text().replace('"val/loss"', '"val/tokens": 9, "val/loss"')
        )
    main(Arguments(str(tmp_path), "no"))
    assert f"best: {tmp_path}/0 (" in capsys.readouterr().out


def test_a_table_of_text_is_not_wider_than_a_terminal():
    rows = [["", *(f"key {i}" for i in range(40))]]
    rows += [[f"run {n}", "x" * 300, *(["0.25"] * 39)] for n in range(3)]
    lines = fitted(rows)
    assert max(map(len, lines)) <= 120
    assert all(any(f"key {i}" in line for line in lines) for i in range(40))
    assert sum(line.startswith("run 2") for line in lines) == len(lines) / 4


def test_a_longer_run_is_no_better_value_of_a_key(tmp_path, capsys):
    for steps in (1, 2):
        make_run(
            tmp_path / str(steps),
            3.0 - steps,
            f"train.steps={steps}",
            train={"steps": steps},
        )
    main(Arguments(str(tmp_path), "no"))
    assert "try larger" not in capsys.readouterr().out


def without_scripts(page):
    """The text of a page, without what Bokeh numbers anew at every call."""
    pattern = r"<script.*?</script>|<div id=.*?>"
    return re.sub(pattern, "", page.read_text(), flags=re.DOTALL)


def test_another_comparison_is_not_overwritten_unless_it_is_said(sweep, capsys):
    def where(*arguments):
        main(Arguments(*arguments))
        return capsys.readouterr().out.splitlines()[-1]

    assert where(str(sweep)) == str(sweep / "compare.html")
    first = without_scripts(sweep / "compare.html")
    assert where(f"{sweep}/1,{sweep}/2") == str(sweep / "compare-2.html")
    # the same runs
    assert where(f"{sweep}/2,{sweep}/1") == str(sweep / "compare-2.html")
    assert where(str(sweep)) == str(sweep / "compare.html")
    assert without_scripts(sweep / "compare.html") == first
    out = str(sweep / "compare.html")
    assert (
        where(f"{sweep}/1,{sweep}/2", out) == f"{out}, in place of another comparison"
    )
