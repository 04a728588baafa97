"""Every key is explained, by the comments of the YAML files."""

import pytest

from trainer.config.composition import choice_of_each_family, choices_of_groups
from trainer.config.reference import comments, reference


@pytest.mark.parametrize(
    "group", ["model", "data", "optimizer", "parallel", "schedule", "tracker"]
)
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
