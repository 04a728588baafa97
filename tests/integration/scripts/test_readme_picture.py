"""The README's picture draws every seed of a parity study, and the bytes that
docs/results.md has."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.studies.readme_picture import (
    BARS,
    RESULTS,
    Arguments,
    main,
    read_study,
    state_bytes,
)
from trainer.errors import UserError
from trainer.observe.records import encode_row

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "gain.svg"
SVG = "{http://www.w3.org/2000/svg}"


def write_study(out, losses):
    """A study of four steps with two validations; `losses` are those of the last by
    item and seed, None: it goes on."""
    out.mkdir(exist_ok=True)
    (out / "study.json").write_text(json.dumps({"steps": 4, "model": "gpt2_nano"}))
    for item, finals in losses.items():
        for seed, final in enumerate(finals):
            folder = out / "1x" / item / str(seed)
            folder.mkdir(parents=True)
            rows = [
                (2, {"val/loss": 3.0}),
                (4, {"train/loss": 1.0} if final is None else {"val/loss": final}),
            ]
            (folder / "metrics.jsonl").write_bytes(
                b"".join(encode_row(*row) for row in rows)
            )
    return Arguments(out=str(out / "gain.svg"), study=str(out), last=1)


def lines_of(path):
    """The curves of a picture, by class."""
    paths = ElementTree.parse(path).getroot().findall(f"{SVG}path")
    return {
        kind: [p.findtext(f"{SVG}title") for p in paths if p.get("class") == kind]
        for kind in ("base", "ours")
    }


def test_a_line_for_each_seed_that_has_ended_in_both_and_their_paired_difference(
    tmp_path, capsys
):
    args = write_study(
        tmp_path, {"fp32": [2.0, 2.0, 2.0], "scalify_fp8_fp16": [2.01, 2.03, None]}
    )
    main(args)
    actual = lines_of(args.out)
    # two seeds in two plots
    assert [len(actual[kind]) for kind in ("base", "ours")] == [4, 4]
    assert actual["ours"][:2] == [
        f"scalify_fp8_fp16, run {i}: {loss} at the end"
        for i, loss in ((1, "2.0100"), (2, "2.0300"))
    ]
    # t(0.975, 1) = 12.71 times 0.01
    assert "at the end +1.00 ± 6.35 %, 2 pairs" in capsys.readouterr().out


def test_what_is_no_study_or_has_no_pair_is_said(tmp_path):
    with pytest.raises(UserError, match="no directory of a parity study"):
        read_study(Arguments("x", study=str(tmp_path / "gone")))
    args = write_study(tmp_path, {"fp32": [2.0, None], "scalify_fp8_fp16": [None, 2.0]})
    with pytest.raises(
        UserError, match="no seed has ended in both fp32 and scalify_fp8_fp16"
    ):
        read_study(args)


def test_the_picture_in_the_readme_has_the_bytes_of_the_results_and_is_small(tmp_path):
    actual = state_bytes(RESULTS.read_text())
    assert (actual["bf16"], actual["scalify_fp8_fp16"], actual["scalify_fp8_fp8"]) == (
        12.0,
        6.0,
        4.0,
    )
    text = PICTURE.read_text()
    # else: scripts.studies.readme_picture draws it anew
    spoken = re.search(r'aria-label="([^"]*)"', text)[1]
    assert spoken.endswith(
        "parameter: " + ", ".join(f"{name} {actual[name]:g}" for name in BARS)
    )
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 100_000
    counts = {kind: len(titles) for kind, titles in lines_of(PICTURE).items()}
    assert counts["base"] == counts["ours"] >= 2
