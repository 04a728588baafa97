"""A checkpoint in other arithmetic, on other text and on tasks, from the command."""

import json
import re
import shutil

import pytest
from command import here

from trainer.assembly import evaluation
from trainer.cli.commands import run
from trainer.cli.evaluate import Arguments, main, policy_of
from trainer.cli.generate import Arguments as Prompts
from trainer.cli.generate import main as generate
from trainer.errors import UserError

TEXT = "In the beginning was the word. " * 1600


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("fp9", "fp9"),
        ("fp8_delayed", "its scales come from a history that only training writes"),
        ("bf16+model.n_layer=7", "model.n_layer=7 does not belong to the precision"),
        ("seed=3", "expected the name of a precision first"),
    ],
)
def test_other_arithmetic_that_cannot_be_is_refused(item, message):
    with pytest.raises(UserError, match=re.escape(message)):
        policy_of(item)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Four steps of the flagship on a text."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT)
    settings = [
        "precision=scalify_fp8_fp16",
        "train.steps=4",
        "data=text",
        "data.format=text",
        "data.tokenizer=byte",
        f"data.paths=[{folder}/text.txt]",
        f"data.cache_dir={folder}/data",
    ]
    here(folder, "run", *settings)
    return folder / "run"


def results_of(run_dir):
    """The results of an evaluation, which is valid JSON without NaN."""
    text = (run_dir / "evaluation.json").read_text()
    return json.loads(text, parse_constant=pytest.fail)["results"]


def test_the_same_weights_are_validated_in_each_precision(run_dir, capsys):
    items = ["fp32", "scalify_fp8+precision.exclude=[h.0.*]", "scalify_fp8_fp16"]
    main(Arguments(str(run_dir), ", ".join([*items, "sim_e3m2"]), batches=3))
    losses = {result["precision"]: result["loss"] for result in results_of(run_dir)}
    assert list(losses) == ["as trained", *items, "sim_e3m2"]
    as_trained = losses["as trained"]
    assert losses["scalify_fp8_fp16"] == pytest.approx(as_trained, rel=1e-6)
    errors = {name: abs(loss - losses["fp32"]) for name, loss in losses.items()}
    assert 0 < errors[items[1]] < errors["as trained"] < errors["sim_e3m2"]
    for result in results_of(run_dir):
        difference = result["loss"] - as_trained
        assert result["difference"] == pytest.approx(difference, abs=1e-6)
    printed = capsys.readouterr().out
    assert "step 4; 3 batches, " in printed
    figures = r"\d\.\d{4} +\d\.\d{4} +[+-]0\.\d{4} ± 0\.\d{4} +[+-]0\.\d\d$"
    assert re.search(rf"^fp32 +{figures}", printed, re.MULTILINE)


def test_a_precision_that_overflows_is_a_result(run_dir, capsys, monkeypatch):
    losses = iter([[2.0, 2.0], [float("inf"), float("nan")]])
    monkeypatch.setattr(evaluation, "batch_losses", lambda *_: next(losses))
    main(Arguments(str(run_dir), "bf16", batches=2))
    as_trained, other = results_of(run_dir)
    assert as_trained["loss"] == 2.0
    keys = ("loss", "difference", "half_width")
    assert [other[key] for key in keys] == [None] * 3
    assert re.search(r"^bf16 +nan", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precisions": ","}, "precisions=,: expected a name, such as precisions="),
        ({"batches": -1}, "batches=-1: expected 0 or more"),
        ({"tasks": "last_wrd"}, "'last_wrd' is n"),
        ({"tasks": "last_word", "text": "x"}, "tasks and text: give one of them"),
        (
            {"precisions": "scalify_fp8+precision.exclude=[zzz]"},
            "no matmul matches 'zzz'",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_computed(
    run_dir, arguments, message
):
    with pytest.raises(UserError, match=re.escape(message)):
        main(Arguments(str(run_dir), **arguments))


def test_other_text_is_evaluated_and_is_not_taken_for_the_validation(
    run_dir, tmp_path, capsys
):
    main(Arguments(str(run_dir), batches=3))
    as_trained = (run_dir / "evaluation.json").read_text()
    # the validation part
    (tmp_path / "a.txt").write_text(TEXT[int(0.9 * len(TEXT)) :])
    (tmp_path / "b.jsonl").write_text('{"body": "qqqqzzzz"}\n' * 900)
    for name, column in (("a.txt", "text"), ("b.jsonl", "body")):
        text = {"text": str(tmp_path / name), "column": column}
        main(Arguments(str(run_dir), batches=3, **text))
    document = json.loads((run_dir / "evaluation_of_text.json").read_text())
    assert document["text"] == str(tmp_path / "b.jsonl")
    assert document["tokens"] == 3 * 512
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if line.startswith("as trained")]
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


def test_data_whose_text_has_changed_are_read_where_prepared_and_else_refused(
    run_dir, tmp_path, monkeypatch
):
    main(Arguments(str(run_dir)))
    saved_evaluation = (run_dir / "evaluation.json").read_text()
    text, prepared = run_dir.parent / "text.txt", run_dir.parent / "data"
    text.write_text("And the word was with God. " * 1600)
    try:
        main(Arguments(str(run_dir)))
        assert (run_dir / "evaluation.json").read_text() == saved_evaluation
        shutil.rmtree(prepared)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match="was trained on other data than"):
            main(Arguments(str(run_dir)))
    finally:
        text.write_text(TEXT)
        shutil.rmtree(prepared, ignore_errors=True)


def test_the_run_is_explained_at_its_newest_checkpoint(run_dir, capsys):
    assert run("explain", [f"run_dir={run_dir}", "batch=1", "top=1000"]) == 0
    printed = capsys.readouterr().out
    # of E4M3 and E5M2, whose roundings add up to some percent
    assert "no equation loses much" in printed
    assert "fp8_dot_general.fwd" in printed
    assert "fp8_dot_general.bwd (backward)" in printed


def test_tasks_are_scored_in_each_precision(run_dir, capsys):
    main(Arguments(str(run_dir), "fp32", tasks="last_word", limit=12, batch=4))
    results = json.loads((run_dir / "tasks.json").read_text())["results"]
    assert [result["precision"] for result in results] == ["as trained", "fp32"]
    printed = capsys.readouterr().out
    for result in results:
        value, error = (
            result["tasks"]["last_word"]["acc"][key] for key in ("value", "error")
        )
        assert 0 <= value <= 1
        columns = f"{result['precision']} +last_word +acc"
        assert re.search(f"{columns} +{value:.4f} ± {error:.4f}", printed)
    assert (run_dir / "tasks" / "last_word.yaml").is_file()
