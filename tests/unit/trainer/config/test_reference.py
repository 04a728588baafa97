"""Every key is explained, by the comments of the YAML files."""

import pytest

from trainer.config.composition import choice_of_each_family, choices_of_groups
from trainer.config.reference import reference


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


def test_the_valid_names_of_a_key_are_listed_whether_or_not_it_may_be_null():
    choices = {key.name: key.choices for g in reference() for key in g.keys}
    assert choices["tracker.kind"] == ("wandb", "tensorboard", "jsonl", "none")
    assert choices["diloco.data"] == ("split", "sources")
    assert choices["data.format"] == ("text", "jsonl", "parquet")
    assert choices["train.steps"] == ()
