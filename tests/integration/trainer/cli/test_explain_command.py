"""From the command line: a fresh model is explained, and what cannot be is refused in a
line.

A run is, where there is one: in test_evaluate_command.py.
"""

import json

import pytest

from trainer.cli.commands import run


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A tiny model of a text of its own."""
    folder = tmp_path_factory.mktemp("explained")
    (folder / "text.txt").write_text("In the beginning was the word. " * 1600)
    data = [
        "data=text",
        "data.format=text",
        "data.tokenizer=byte",
        f"data.paths=[{folder}/text.txt]",
    ]
    sizes = [
        "model.n_layer=1",
        "model.d_model=32",
        "model.n_head=2",
        "model.context=32",
        "train.batch_tokens=256",
    ]
    return folder, [
        "precision=scalify_fp8_fp16",
        *data,
        f"data.cache_dir={folder}/data",
        *sizes,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["top=0"], "top=0: expected 1 or more"),
        (["top=many"], "top=many: expected a whole number"),
        (["batch=-1"], "batch=-1: expected 0 or more"),
        (["run_dir=/nowhere"], "/nowhere is not a run directory"),
        (
            ["run_dir=/nowhere", "precision=fp32"],
            "precision=fp32: a run has its own configuration",
        ),
        (["precison=fp32"], "precison"),
        (
            ["out=/nowhere/rows.json"],
            "out=/nowhere/rows.json: expected a file in a directory that exists",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, message, capsys):
    assert run("explain", arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_more_sequences_than_there_are_are_refused(settings, capsys):
    _, arguments = settings
    assert run("explain", [*arguments, "sequences=1000"]) == 2
    assert "sequences=1000: a micro-batch of this run has 8" in capsys.readouterr().err


def test_a_precision_without_scales_is_refused(settings, capsys):
    _, arguments = settings
    assert run("explain", [*arguments[1:], "precision=bf16"]) == 2
    error = capsys.readouterr().err
    assert "scaling=none has no scales to explain; valid: propagate, mx," in error


# the table, small: unit/trainer/cli/test_explain.py; the figures: test_numerics.py
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mxfp8", "scalify_mxfp8"])
def test_blocks_of_operands_are_a_table(settings, precision, capsys):
    folder, arguments = settings
    out = folder / f"{precision}.json"
    assert (
        run(
            "explain", [*arguments[1:], f"precision={precision}", "top=2", f"out={out}"]
        )
        == 0
    )
    text = capsys.readouterr().out.split("blocks of 12 operands;")[1]
    shown = [line.split() for line in text.splitlines()[3:5]]
    blocks = json.loads(out.read_text())["blocks"]
    assert len(blocks) == 12  # four products of three operands
    # Gradients of queries, keys and values are of different sizes.
    assert shown[0][0] == "activation_gradients/h.0.attn.c_attn.out"
    for tensor, spread, underflow, saturated in shown:
        figures = blocks[tensor]
        assert float(spread) == pytest.approx(figures["block_spread"], abs=0.005)
        assert underflow == f"{figures['block_underflow']:.2%}"
        assert saturated == f"{figures['block_saturated']:.2%}"


@pytest.mark.slow  # the explanation itself: unit/scalify_core/test_explain.py
def test_a_fresh_model_is_explained_and_its_rows_are_written(settings, capsys):
    folder, arguments = settings
    assert (
        run("explain", [*arguments, "top=5", f"out={folder}/rows.json", "sequences=8"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "largest error of a result" in printed
    table = printed.split("\n\n")[1].splitlines()
    assert len([line for line in table if line.startswith("  ")]) == 1 + 5  # the titles
    document = json.loads((folder / "rows.json").read_text())
    fp8 = [row for row in document["rows"] if row["dtype"] == "float8_e4m3fn"]
    assert fp8
    assert all(row["flushed"] < 0.01 and row["saturated"] == 0 for row in fp8)
    assert {row["backward"] for row in document["rows"]} == {False, True}
    assert max(document["errors"]) < 0.5
