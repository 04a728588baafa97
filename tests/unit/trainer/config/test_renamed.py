"""Renamed keys: an old one is answered with its new name, and a saved configuration is
read with it."""

from trainer.cli.train import main
from trainer.config.composition import compose_config
from trainer.config.fields import flatten, from_saved, to_tree
from trainer.config.renamed import RENAMED_KEYS, renamed_keys
from trainer.config.schema import Config


def test_every_new_name_is_a_key_and_no_old_name_is():
    keys = {key for key, _ in flatten(to_tree(compose_config([])))}
    assert set(RENAMED_KEYS.values()) <= keys
    assert not set(RENAMED_KEYS) & keys


def test_an_old_key_is_answered_with_its_new_name_in_one_line(capsys):
    for old, new in RENAMED_KEYS.items():
        assert main([f"{old}=1"]) == 2
        line = f"error: {old}=1: this key was renamed; use {new}=1\n"
        assert capsys.readouterr().err == line


def with_old_names(tree):
    """Return a configuration as it was saved before the renames."""
    old = {
        group: dict(keys) if isinstance(keys, dict) else keys
        for group, keys in tree.items()
    }
    for old_name, new_name in RENAMED_KEYS.items():
        old_group, old_key = old_name.split(".")
        new_group, new_key = new_name.split(".")
        if new_key in old.get(new_group, {}):
            old[old_group][old_key] = old[new_group].pop(new_key)
    old.pop("diloco", None)
    return old


def test_a_configuration_saved_with_old_names_is_the_same_configuration():
    settings = ["precision.exclude=[h.0.*]", "parallel=diloco", "diloco.replicas=2"]
    settings += ["train.grad_accum_steps=2", "sample.max_new_tokens=7", "run_dir=a"]
    config = compose_config(["precision=scalify_fp8", *settings])
    old = with_old_names(to_tree(config))
    assert old["parallel"]["local"] == 2
    assert from_saved(Config, old) == config
    assert renamed_keys(renamed_keys(old)) == renamed_keys(old)
