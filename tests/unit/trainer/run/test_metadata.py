"""Metadata of checkpoints: what models of any width have."""

import dataclasses

import jax
import pytest

from trainer.errors import UserError
from trainer.models.llama.spec import LlamaSpec
from trainer.models.registry import family_of
from trainer.run.compatibility import architecture
from trainer.run.metadata import validate_metadata

NARROW = LlamaSpec(
    vocab_size=64, n_layer=2, n_head=2, n_kv_head=1, d_model=256, head_dim=2, d_mlp=4
)


def arrays_of(spec):
    params = jax.eval_shape(family_of(spec).build(spec).init, jax.random.key(0))
    return {
        jax.tree_util.keystr(path): {
            "shape": list(leaf.shape),
            "dtype": "float32",
            "checksum": "0",
        }
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def test_a_model_with_narrow_heads_and_mlp_is_read():
    arrays = arrays_of(NARROW)
    validate_metadata({"model": architecture(NARROW)}, arrays, "checkpoint 3")
    wide = dataclasses.replace(NARROW, d_model=2**20, head_dim=2)
    with pytest.raises(UserError, match=r"width 1,048,576 .* have at least"):
        validate_metadata({"model": architecture(wide)}, arrays, "checkpoint 3")


def test_numbers_that_no_run_writes_are_refused():
    for odd in (
        {"watchdog": {"losses": [1e308] * 300}},
        {"unfinished": '{"step": 3, "a": 1}'},
    ):
        with pytest.raises(UserError, match="checkpoint 3"):
            validate_metadata(odd, {}, "checkpoint 3")
