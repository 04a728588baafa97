"""A checkpoint in other arithmetic: what can be asked for, and what is found."""

import functools
import json
import re
import shutil

import pytest
from command import here

from trainer.assembly import evaluation
from trainer.cli import explain
from trainer.cli.evaluate import Arguments, main, policy_of
from trainer.cli.generate import Arguments as Prompts
from trainer.cli.generate import main as generate
from trainer.errors import UserError
from trainer.observe import progress


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("fp9", "fp9"),
        ("fp8_delayed", "its scales come from a history that only training writes"),
        ("bf16+model.n_layer=7", "model.n_layer=7 does not belong to the precision"),
        ("seed=3", "expected the name of a precision first"),
    ],
)
def test_what_makes_no_other_arithmetic_is_refused(item, message):
    with pytest.raises(UserError, match=re.escape(message)):
        policy_of(item)


def test_a_change_of_a_precision_is_taken():
    assert policy_of("scalify_fp8+precision.exclude=[h.0.*]").exclude == ("h.0.*",)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Of the flagship, four steps of a tiny model on a text of its own."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("In the beginning was the word. " * 1600)
    settings = [
        "precision=scalify_fp8_fp16",
        "train.steps=4",
        "sample.max_new_tokens=0",
        "metrics.numerics_every=0",
    ]
    settings += [
        "data=text",
        "data.format=text",
        "data.tokenizer=byte",
        f"data.paths=[{folder}/text.txt]",
    ]
    settings += [f"data.cache_dir={folder}/data"]
    here(folder, "run", *settings)
    return folder / "run"


def test_the_same_weights_are_validated_in_each_precision(run_dir, capsys):
    items = "fp32, bf16,scalify_fp8_fp16,sim_e3m2"
    main(Arguments(str(run_dir), items, batches=3))
    document = json.loads((run_dir / "evaluation.json").read_text())
    actual = {result["precision"]: result for result in document["results"]}
    assert list(actual) == [
        "as trained",
        "fp32",
        "bf16",
        "scalify_fp8_fp16",
        "sim_e3m2",
    ]
    as_trained = actual["as trained"]["loss"]
    assert document["step"] == 4
    # it is the same
    assert actual["scalify_fp8_fp16"]["loss"] == pytest.approx(as_trained, rel=1e-6)
    apart = {
        name: abs(result["loss"] - actual["fp32"]["loss"])
        for name, result in actual.items()
    }
    assert 0 < apart["bf16"] < apart["as trained"] < apart["sim_e3m2"]
    for result in actual.values():
        assert result["difference"] == pytest.approx(
            result["loss"] - as_trained, abs=1e-6
        )
    printed = capsys.readouterr().out
    assert "step 4; 3 batches, " in printed
    assert re.search(
        r"^fp32 +\d\.\d{4} +\d\.\d{4} +[+-]0\.\d{4} ± 0\.\d{4} +[+-]0\.\d\d$",
        printed,
        re.MULTILINE,
    )


def test_a_single_batch_has_no_interval_and_a_long_compilation_is_said(
    run_dir, capsys, monkeypatch
):
    monkeypatch.setattr(
        progress, "log_duration", functools.partial(progress.log_duration, seconds=0.0)
    )
    main(Arguments(str(run_dir), "fp32", batches=1))
    out, err = capsys.readouterr()
    assert "±" not in out
    assert re.search(r"^compiling the evaluation: \d+ s$", err, re.MULTILINE)
    text = (run_dir / "evaluation.json").read_text()
    assert [
        r["half_width"] for r in json.loads(text, parse_constant=pytest.fail)["results"]
    ] == [None, None]


def test_a_precision_that_overflows_is_a_result(run_dir, capsys, monkeypatch):
    actual = iter([[2.0, 2.0], [float("inf"), float("nan")]])
    monkeypatch.setattr(evaluation, "losses", lambda *_: next(actual))
    main(Arguments(str(run_dir), "bf16", batches=2))
    as_trained, other = json.loads(
        (run_dir / "evaluation.json").read_text(), parse_constant=pytest.fail
    )["results"]
    assert (
        as_trained["loss"],
        other["loss"],
        other["difference"],
        other["half_width"],
    ) == (
        2.0,
        None,
        None,
        None,
    )
    assert re.search(r"^bf16 +nan", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precisions": ","}, "expected at least one"),
        ({"batches": -1}, "batches=-1: expected 0 or more"),
        ({"tasks": ","}, "tasks=: expected at least one"),
        ({"tasks": "last_wrd"}, "'last_wrd' is n"),
        ({"tasks": "last_word", "text": "x"}, "tasks and text: give one of them"),
        ({"tasks": "last_word", "batch": 0}, "batch=0: expected 1 or more"),
        (
            {"precisions": "scalify_fp8+precision.exclude=[zzz]"},
            "no matmul matches 'zzz'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_computed(
    run_dir, capsys, arguments, message
):
    with pytest.raises(UserError, match=re.escape(message)):
        main(Arguments(str(run_dir), **arguments))


def test_other_text_is_evaluated_too_and_is_not_taken_for_the_validation(
    run_dir, tmp_path, capsys
):
    main(Arguments(str(run_dir), batches=3))
    as_trained = (run_dir / "evaluation.json").read_text()
    whole = "In the beginning was the word. " * 1600
    # the validation part
    (tmp_path / "a.txt").write_text(whole[int(0.9 * len(whole)) :])
    (tmp_path / "b.jsonl").write_text('{"body": "qqqqzzzz"}\n' * 900)
    for name, column in (("a.txt", "text"), ("b.jsonl", "body")):
        main(
            Arguments(
                str(run_dir),
                batches=3,
                text=str(tmp_path / name),
                column=column,
            )
        )
    document = json.loads((run_dir / "evaluation_of_text.json").read_text())
    assert document["text"] == str(tmp_path / "b.jsonl")
    assert document["tokens"] == 3 * 512
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("as trained")
    ]
    assert lines[0] == lines[1] != lines[2]
    assert (run_dir / "evaluation.json").read_text() == as_trained
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match=r"5 tokens, one batch needs 513"):
        main(Arguments(str(run_dir), "fp32", text=str(tmp_path / "a.txt")))


def test_texts_of_several_prompts_are_sampled(run_dir, tmp_path, capsys):
    """Prompts of standard input: unit/trainer/cli/test_commands.py."""
    prompts = tmp_path / "prompts"
    prompts.write_text("In the\nWas\n")
    generate(Prompts(str(run_dir), prompts=str(prompts), count=2, max_new_tokens=4))
    texts = capsys.readouterr().out.split("\n\n")
    assert [text[:3] for text in texts] == ["In ", "In ", "Was", "Was"]
    for wrong in ({"prompts": "none"}, {"prompts": "-", "prompt": "a"}, {"count": 0}):
        with pytest.raises(UserError):
            generate(Prompts(str(run_dir), **wrong))


def test_prepared_data_are_evaluated_though_their_text_has_changed(
    run_dir, changed_text
):
    main(Arguments(str(run_dir)))
    with_change = (run_dir / "evaluation.json").read_text()
    changed_text.write_bytes(changed_text.with_name("before.txt").read_bytes())
    main(Arguments(str(run_dir)))
    assert (run_dir / "evaluation.json").read_text() == with_change


def test_another_text_than_was_trained_on_is_refused(
    run_dir, changed_text, tmp_path, monkeypatch
):
    """Nothing prepared is left, so the data are prepared from the changed text."""
    monkeypatch.chdir(tmp_path)
    prepared = run_dir.parent / "data"
    prepared.rename(run_dir.parent / "elsewhere")
    try:
        with pytest.raises(UserError, match="was trained on other data than"):
            main(Arguments(str(run_dir)))
    finally:
        (run_dir.parent / "elsewhere").rename(prepared)


@pytest.fixture
def changed_text(run_dir):
    text = run_dir.parent / "text.txt"
    before = shutil.copy(text, run_dir.parent / "before.txt")
    text.write_text("And the word was with God. " * 1600)
    yield text
    shutil.move(before, text)


def test_the_run_is_explained_at_its_newest_checkpoint(run_dir, capsys):
    assert explain.command([f"run_dir={run_dir}", "batch=1", "top=1000"]) == 0
    printed = capsys.readouterr().out
    # of E4M3 and E5M2, whose roundings add up to some percent
    assert "no equation loses much" in printed
    assert "fp8_dot_general.fwd" in printed
    assert "fp8_dot_general.bwd (backward)" in printed


def test_tasks_are_scored_in_each_precision(run_dir, capsys):
    main(Arguments(str(run_dir), "fp32", tasks="last_word", limit=12, batch=4))
    document = json.loads((run_dir / "tasks.json").read_text())
    assert [result["precision"] for result in document["results"]] == [
        "as trained",
        "fp32",
    ]
    printed = capsys.readouterr().out
    for result in document["results"]:
        score = result["tasks"]["last_word"]["acc"]
        assert 0 <= score["value"] <= 1
        line = (
            f"{result['precision']} +last_word +acc +{score['value']:.4f} ±"
            f" {score['error']:.4f}"
        )
        assert re.search(line, printed)
    assert (run_dir / "tasks" / "last_word.yaml").is_file()
