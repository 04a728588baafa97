"""Models of `tests/data/families`, whose logits are transformers', with other files."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trainer.config.inherited import inherit
from trainer.errors import UserError
from trainer.files import read_object
from trainer.models import huggingface

DATA = Path(__file__).parents[1] / "data" / "families"
WEIGHTS = "model.safetensors"


def tensors_of(name):
    return load_file(DATA / name / WEIGHTS)


def config_of(name, **changes):
    """Return a model's config.json; what is "absent" is left out."""
    config = read_object(DATA / name / "config.json") | changes
    return {key: value for key, value in config.items() if value != "absent"}


def copied(directory, name, config=(), tensors=()):
    """Write a model of the families with another config.json or tensors, which are
    given or computed from its own; None removes one."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = tensors_of(name)
    weights = tensors(weights) if callable(tensors) else weights | dict(tensors)
    weights = {key: value for key, value in weights.items() if value is not None}
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config_of(name, **dict(config)))
    (directory / "config.json").write_text(text)
    return directory


def read(directory):
    """Return spec and parameters, after `model=from_init` has read the config.json."""
    inherit({"name": "from_init"}, str(directory))
    return huggingface.load(directory, None)


def check_same(name, directory):
    """Assert that a directory is read as the model that it was made of."""
    (spec, params), (expected_spec, expected) = map(read, (directory, DATA / name))
    assert spec == expected_spec
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def check_refused(directory, message):
    """Assert that a directory is refused in one line by both readers."""
    with pytest.raises(UserError, match=message) as error:
        read(directory)
    assert "\n" not in str(error.value)
    assert "damaged" not in str(error.value)
