"""Runs are compared: the best first, the keys that differ, and where the page goes."""

import json
import shutil

import pytest
import yaml

from trainer.cli.compare import Arguments, main, run_directories
from trainer.errors import UserError
from trainer.report.comparison import (
    NO_FINAL_LOSS,
    OTHER_TEXT,
    RANKED,
    ranked_entries,
)
from trainer.report.differing_settings import differing_settings, overridden
from trainer.report.run_records import RunRecords


def make_run(folder, loss, overrides, *, digest="a", **settings):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": i, "tokens": i, "train/loss": 5.0 - i, "lr": 1e-3} for i in (1, 2)]
    rows[-1] |= {"val/loss": loss, "val/tokens": 9}
    write_rows(folder, rows)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    facts = f"overrides: {overrides}\nvalidation digest: {digest}\n"
    facts += "final validation tokens: 9\n"
    (folder / "environment.txt").write_text(facts)


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
            digest="b" if i == 3 else "a",
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


def test_a_best_value_at_an_end_of_those_tried_is_told(sweep, compare):
    advice = "the best optimizer.lr is the {} tried, 0.001; try {}"
    assert advice.format("smallest", "smaller") in compare(f"{sweep}/6,{sweep}/9")
    assert advice.format("largest", "larger") in compare(f"{sweep}/0,{sweep}/6")
    assert "the best optimizer.lr" not in compare(sweep)


def test_settings_that_are_best_by_the_mean_over_seeds_are_named(tmp_path, compare):
    losses = {("1", 0): 3.0, ("1", 1): 3.4, ("2", 0): 3.1, ("2", 1): 3.1}
    for (lr, seed), loss in losses.items():
        settings = {"seed": seed, "optimizer": {"lr": lr}, "train": {"steps": 2}}
        overrides = f"optimizer.lr={lr} seed={seed}"
        make_run(tmp_path / "sweep" / f"{lr}-{seed}", loss, overrides, **settings)
    out = compare(tmp_path / "sweep")
    assert "by the mean over seeds, optimizer.lr=2 is the best; the best single" in out
    assert "the best optimizer.lr is the largest tried, 2; try larger" in out


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
    a, b, c = (RunRecords.read(tmp_path / name, name) for name in "abc")
    assert overridden([a, b]) == {"optimizer.lr": ["0.1", "0.2"]}
    assert differing_settings([a, b]) == {}
    assert overridden([a, c])["data"] == ["text", "hf"]
    assert overridden([a, c])["parallel"] == ["fsdp", "-"]


def test_words_of_an_override_with_spaces_are_no_settings(tmp_path):
    make_run(tmp_path / "a", 3.0, "optimizer.lr=0.1 data.paths=[my text.txt]", seed=0)
    make_run(tmp_path / "b", 3.0, "optimizer.lr=0.1", seed=0)
    runs = [RunRecords.read(tmp_path / name, name) for name in "ab"]
    assert list(overridden(runs)) == ["data.paths"]


def test_the_page_is_written_where_the_runs_are_named_and_not_where_links_lead(
    sweep, tmp_path, capsys
):
    named, private = tmp_path / "named", tmp_path / "private"
    named.mkdir()
    shutil.move(sweep, private)
    for job in "12":
        (named / job).symlink_to(private / job)
    main(Arguments(str(named)))
    assert (named / "compare.html").exists()
    assert not (private / "compare.html").exists()


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


def test_runs_without_a_log_are_said(sweep, capsys):
    (sweep / "3" / "metrics.jsonl").unlink()
    assert len(run_directories(str(sweep))) == 11
    line = (
        f"{sweep / '3'}: left out, without a metrics.jsonl (tracker=none, or no step)"
    )
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("3,{}/nowhere", "there is no directory .*nowhere "),
        ("1,{}/2", r"1 has no metrics\.jsonl with rows; .*tracker=jsonl"),
        ("3,{}/3", "given twice"),
    ],
)
def test_directories_that_are_no_runs_are_refused(sweep, compare, runs, message):
    for name in ("1", "2"):
        (sweep / name / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=message):
        compare(f"{sweep}/{runs}".format(sweep))


def validated(name, loss, tokens, step=2, config=""):
    """Return a run of two steps that was last validated after `step`."""
    logged = [{"step": i, "tokens": i, "train/loss": 5.0 - i} for i in (1, 2)]
    logged[step - 1] |= {"val/loss": loss, "val/tokens": tokens}
    facts = {"validation digest": "a", "validation tokens": "100,000"}
    facts |= {"final validation tokens": "12800"}
    config = f"train: {{steps: 2}}\n{config}"
    return RunRecords(name, logged, [], config, facts=facts)


def marks(*runs):
    return [(entry.records.name, entry.ranking) for entry in ranked_entries(runs)]


def test_runs_that_read_less_of_the_validation_text_are_not_ranked():
    a, b = validated("a", 3.0, 12_800), validated("b", 2.5, 12_800)
    less = ("c", "validated on 5,120 tokens, not ranked")
    entries = marks(a, b, validated("c", 2.0, 5_120))
    assert entries == [("b", RANKED), ("a", RANKED), less]
    # All of the text, but for the part of a batch.
    complete = validated("a", 3.0, 99_840)
    entries = marks(complete, validated("b", 2.5, 99_328))
    assert entries == [("b", RANKED), ("a", RANKED)]
    # The end of the text may be of another kind.
    less = ("b", "validated on 98,304 tokens, not ranked")
    assert marks(complete, validated("b", 2.5, 98_304)) == [("a", RANKED), less]


@pytest.mark.parametrize("tokens", [256, 12_800])
def test_a_run_that_stopped_early_is_not_ranked_beside_finished_ones(tokens):
    early = validated("c", 1.0, tokens, step=1)
    finished = validated("a", 3.0, 12_800), validated("b", 2.0, 12_800)
    entries = marks(early, *finished)
    assert entries == [("b", RANKED), ("a", RANKED), ("c", NO_FINAL_LOSS)]
    other = validated("d", 1.1, tokens, step=1)
    assert marks(early, other) == [("c", RANKED), ("d", RANKED)]


def test_runs_that_have_all_diverged_early_have_no_best(tmp_path, compare):
    for name in ("a", "b"):
        settings = {"seed": name, "train": {"steps": 3}}
        make_run(tmp_path / name, "NaN", f"seed={name}", **settings)
        first, last = map(json.loads, (tmp_path / name / "metrics.jsonl").open())
        write_rows(tmp_path / name, [first | {"val/loss": 3.0, "val/tokens": 9}, last])
    out = compare(f"{tmp_path}/a,{tmp_path}/b")
    assert "best:" not in out
    assert f"last validated after step 1, not ranked: {tmp_path}/a" in out


MIXTURE = "data: {{source: mix, sources: [a.txt, b.txt], weights: {}, stages: {}}}"


@pytest.mark.parametrize(
    ("first", "same", "other"),
    [
        ("", "data: {boundary_loss: true}", "data: {boundary_loss: false}"),
        (
            MIXTURE.format("[1, 1]", "null"),
            MIXTURE.format("null", "null"),
            MIXTURE.format("[3, 1]", "null"),
        ),
        # A later stage decides: every validation has the shares that a run ends with.
        (
            MIXTURE.format("[2, 2]", "null"),
            MIXTURE.format("[3, 1]", "[[1, 1, 1]]"),
            MIXTURE.format("[1, 1]", "[[1, 3, 1]]"),
        ),
    ],
)
def test_runs_of_another_validation_text_are_not_ranked(first, same, other):
    runs = [
        validated(name, loss, 9, config=config)
        for name, loss, config in (("a", 3, first), ("b", 2, same), ("c", 1, other))
    ]
    assert marks(*runs) == [("b", RANKED), ("a", RANKED), ("c", OTHER_TEXT)]


def test_another_comparison_is_not_overwritten_unless_it_is_named(sweep, compare):
    def page_of(runs, out=None):
        return compare(runs, out).splitlines()[-1]

    all_runs, two_runs = str(sweep / "compare.html"), str(sweep / "compare-2.html")
    assert page_of(sweep) == all_runs
    assert page_of(f"{sweep}/1,{sweep}/2") == two_runs
    assert page_of(f"{sweep}/2,{sweep}/1") == two_runs  # the same runs
    assert page_of(sweep) == all_runs
    replaced = page_of(f"{sweep}/1,{sweep}/2", all_runs)
    assert replaced == f"{all_runs} (replaced an existing file)"


def test_a_run_whose_configuration_was_cut_does_not_count_as_finished(sweep):
    runs = [RunRecords.read(sweep / name, name) for name in ("0", "4")]
    assert [entry.ranking for entry in ranked_entries(runs)] == [RANKED, NO_FINAL_LOSS]
    (sweep / "4" / "config.yaml").write_text("seed: 1\n")
    runs[1] = RunRecords.read(sweep / "4", "4")
    with pytest.raises(
        UserError, match=r"config\.yaml of the run 4 has no train\.step"
    ):
        ranked_entries(runs)
