"""Configurations of tests that change a few keys: groups are composed once a worker."""

import functools
import pickle

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trainer.config.composition import build_config, choices_of_groups, compose_tree
from trainer.config.resume import CommandLine
from trainer.config.schema import Config


@functools.cache
def _composed(choices: tuple[str, ...]) -> bytes:
    return pickle.dumps(compose_tree(choices))


def configured(*overrides: str) -> Config:
    """Return what `compose_config` does of valid keys; Hydra takes most of its time."""
    groups = choices_of_groups()
    choices = tuple(x for x in overrides if x.partition("=")[0] in groups)
    tree = pickle.loads(_composed(choices))
    for override in overrides:
        if override not in choices:
            parsed = OverridesParser.create().parse_override(override)
            key, value = parsed.get_key_element(), parsed.value()
            OmegaConf.update(tree, key, value, merge=False)
    return build_config(tree, CommandLine([], {}))
