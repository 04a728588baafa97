"""Every key is explained, by the comments of the YAML files."""

import pytest

from trainer.config.composition import choice_of_each_family, choices_of_groups
from trainer.config.reference import comments, reference


@pytest.mark.parametrize("group", ["model", "data", "optimizer", "parallel"])
def test_every_key_of_every_choice_has_a_comment(group):
    choices = choices_of_groups()[group]
    if group == "model":  # sizes of a family have its keys
        choices = choice_of_each_family().values()
    for choice in choices:
        groups = reference([f"{group}={choice}"])
        assert [g.name for g in groups if g.name and not g.about] == []
        keys = [key for g in groups for key in g.keys]
        assert [key.name for key in keys if not key.about] == []
        assert len(keys) > 100


def test_values_and_choices_are_those_of_the_overrides():
    groups = {g.name: g for g in reference(["model=llama_nano", "train.steps=7"])}
    keys = {key.name: key for g in groups.values() for key in g.keys}
    assert groups["model"].chosen == "llama_nano"
    assert "gpt2_nano" in groups["model"].choices
    assert keys["train.steps"].default == "7"
    assert keys["model.mlp"].choices == ("swiglu", "smooth_swiglu")
    assert keys["deterministic"].choices == ("auto", "true", "false")
    assert keys["precision.fp8_modules"].default == "[h.*]"
    assert keys["optimizer.lr"].default == keys["model.lr"].default


def test_a_comment_ends_where_the_next_key_or_heading_begins():
    text = """\
a: 1        # one
            # and more
# a heading
b:          # a group
  c: [x]    # of it
            # two lines
  d: null
defaults:
  - model: gpt2  # a choice
  - base/e@e     # no choice
"""
    assert comments(text) == {
        "a": "one and more",
        "b": "a group",
        "b.c": "of it two lines",
        "model": "a choice",
        "e": "no choice",
    }
