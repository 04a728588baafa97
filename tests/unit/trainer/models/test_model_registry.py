"""A family that is added is in every list that is written by hand."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from scripts.studies.families import PRESETS
from trainer.config.composition import CONFIGS
from trainer.models.registry import SPECS

ROOT = Path(__file__).parents[4]
SIZES = sorted(path.stem for path in Path(CONFIGS, "model").glob("*.yaml"))
SIZES.remove("from_init")


def family_of_size(size):
    tree = yaml.safe_load(Path(CONFIGS, "model", f"{size}.yaml").read_text())
    return re.match(r"/base/(\w+)@", tree["defaults"][0])[1]


def test_every_size_is_of_a_family_and_every_family_has_one():
    assert {family_of_size(size) for size in SIZES} == set(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_the_lists_of_families_have_it(name):
    assert family_of_size(PRESETS[name]) == name
    references = (ROOT / "tests/data/families").glob("*/config.json")
    assert name in {json.loads(file.read_text())["model_type"] for file in references}
    keys = yaml.safe_load(Path(CONFIGS, "model/from_init.yaml").read_text())
    assert keys.keys() >= {field.name for field in dataclasses.fields(SPECS[name])}
    page = (ROOT / "docs/models.md").read_text()
    (row,) = re.findall(rf"^\| {name} \|.*\| (.*) \|$", page, re.M)
    sizes = {size for size in SIZES if family_of_size(size) == name}
    assert set(re.findall(r"`(\w+)`", row)) == sizes
