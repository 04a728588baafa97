"""The README's picture shows the figures of docs/results.md as they stand."""

from pathlib import Path

import pytest

from scripts.studies.readme_picture import RESULTS, picture, seed_differences, state_bytes
from trainer.errors import UserError

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "gain.svg"


def test_the_figures_are_those_of_their_tables():
    text = RESULTS.read_text()
    found = state_bytes(text)
    assert (found["bf16"], found["scalify_fp8_fp16"], found["scalify_fp8_fp8"]) == (12.0, 6.0, 4.0)
    seeds = seed_differences(text)
    assert len(seeds["scalify_fp8_fp16"]) == 8
    assert sum(seeds["scalify_fp8_fp16"]) / 8 == pytest.approx(0.23, abs=0.005)


def test_the_picture_is_of_the_figures_as_they_are_now():
    assert PICTURE.read_text() == picture(
        RESULTS.read_text()
    )  # else: python -m scripts.studies.readme_picture out=docs/gain.svg
    assert PICTURE.stat().st_size < 100_000


def test_figures_that_are_gone_are_said():
    with pytest.raises(UserError, match="does not hold what the picture shows"):
        picture("## Memory of the precisions")
