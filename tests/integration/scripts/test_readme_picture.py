"""The README's picture has the bytes of docs/results.md, and pairs of seeds."""

import re
from pathlib import Path
from xml.etree import ElementTree

from scripts.studies.readme_picture import (
    BARS,
    RESULTS,
    state_bytes,
)

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "gain.svg"
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_in_the_readme_has_the_bytes_of_the_results_and_is_small():
    actual = state_bytes(RESULTS.read_text())
    names = ("bf16", "scalify_fp8_fp16", "scalify_fp8_fp8")
    assert [actual[name] for name in names] == [12.0, 6.0, 4.0]
    text = PICTURE.read_text()
    # else: scripts.studies.readme_picture draws it anew
    label = re.search(r'aria-label="([^"]*)"', text)[1]
    assert label.endswith(", ".join(f"{name} {actual[name]:g}" for name in BARS))
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 100_000
    curves = ElementTree.parse(PICTURE).getroot().findall(f"{SVG}path")
    classes = [curve.get("class") for curve in curves]
    assert classes.count("base") == classes.count("ours") >= 2
