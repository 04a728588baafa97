"""Metadata of checkpoints from strangers."""

import dataclasses
import math

import jax
import pytest

from trainer.errors import UserError
from trainer.models.llama.spec import LlamaSpec
from trainer.models.registry import family_of
from trainer.observe.records import encode_row
from trainer.run.compatibility import architecture
from trainer.run.metadata import validate_metadata


def test_numbers_that_no_run_writes_are_refused():
    for odd in (
        {"watchdog": {"losses": [1e308] * 300}},
        {"unfinished": '{"step": 3, "a": 1}'},
        {"totals": None},
    ):
        with pytest.raises(UserError, match="checkpoint 3"):
            validate_metadata(odd, {}, "checkpoint 3")


def test_a_skipped_step_may_be_one_whose_validation_was_interrupted():
    row = encode_row(3, {"train/loss": math.nan, "skipped": 1}).decode()
    assert validate_metadata({"unfinished": row}, {}, "checkpoint 3")


def test_sizes_of_a_model_are_bounded_by_its_arrays_and_heads_may_be_narrow():
    narrow = LlamaSpec(vocab_size=64, n_layer=2, n_head=2, n_kv_head=1, d_model=256)
    narrow = dataclasses.replace(narrow, head_dim=2, d_mlp=4)
    shapes = family_of(narrow).build(narrow).shapes
    arrays = {
        jax.tree_util.keystr(path): {
            "shape": list(leaf.shape),
            "dtype": "float32",
            "checksum": "0",
        }
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    validate_metadata({"model": architecture(narrow)}, arrays, "checkpoint 3")
    for sizes in ({"d_model": 2**20}, {"vocab_size": 2**20}, {"n_layer": 30}):
        large = dataclasses.replace(narrow, **sizes)
        with pytest.raises(UserError, match=r"checkpoint 3: .* have at least"):
            validate_metadata({"model": architecture(large)}, arrays, "checkpoint 3")


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ({"dtype": "<U5"}, "x is <U5, which is no format of numbers"),
        ({"dtype": "float17"}, "float17"),
        ({"shape": [-1]}, "shape"),
        ({"checksum": []}, "checksum"),
        ({"impl": "md5"}, "impl"),
    ],
)
def test_a_description_of_an_array_that_cannot_be_is_refused(leaf, message):
    right = {"shape": [2], "dtype": "float16", "checksum": "0" * 16}
    validate_metadata({}, {"x": right}, "checkpoint 3")
    with pytest.raises(UserError, match=f"checkpoint 3.*{message}"):
        validate_metadata({}, {"x": right | leaf}, "checkpoint 3")
