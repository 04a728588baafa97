"""Where the state lives: which axis of which array is split, and what does not fit said
in one line."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from trainer.errors import UserError
from trainer.models.gpt2.model import build_functions
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.roles import Role
from trainer.parallel.mesh import MeshSizes, make_mesh
from trainer.parallel.sharding import (
    array_specs,
    fsdp_axis,
    mesh_axes,
    partition_spec,
)

SPEC = GPT2Spec(vocab_size=256, context=32, n_layer=2, n_head=4, d_model=64)


def specs_of(spec, mesh):
    """The spec of every parameter of a model, by name."""
    model = build_functions(spec)
    tree = array_specs(model.shapes, mesh, model.roles)
    actual = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): spec
        for path, spec in actual
    }


def test_fsdp_splits_every_parameter_along_its_first_axis():
    assert all(spec[0] == "fsdp" for spec in specs_of(SPEC, make_mesh(1, 8)).values())
    stacked = specs_of(dataclasses.replace(SPEC, scan_layers=True), make_mesh(1, 8))
    # layers are not split
    assert stacked["h.attn.c_attn.kernel"] == PartitionSpec(None, "fsdp", None)


def test_tensor_splits_by_heads_and_hidden_channels():
    specs = specs_of(SPEC, make_mesh(1, 4, 2))
    for name, spec in {
        "h.0.mlp.c_fc.kernel": ("fsdp", "tensor"),
        "h.0.mlp.c_fc.bias": (("tensor", "fsdp"),),
        "h.0.mlp.c_proj.kernel": (("tensor", "fsdp"), None),
        "h.0.mlp.c_proj.bias": ("fsdp",),
        "h.0.attn.c_proj.kernel": (("tensor", "fsdp"), None),
        "wte.embedding": ("fsdp", None),
    }.items():
        assert specs[name] == PartitionSpec(*spec)
    spec = specs["h.0.mlp.c_fc.kernel"]
    assert (fsdp_axis(spec), mesh_axes(spec)) == (0, ("fsdp", "tensor"))


def test_what_cannot_be_split_stays_whole():
    sizes, role = {"data": 1, "fsdp": 8, "tensor": 1}, Role("table")
    assert partition_spec(role, (), sizes) == PartitionSpec()
    assert partition_spec(role, (12, 5), sizes) == PartitionSpec(None, None)
    assert partition_spec(role, (12, 16), sizes) == PartitionSpec(None, "fsdp")
    assert partition_spec(role, (0, 16), sizes) == PartitionSpec(None, "fsdp")
    # what is no parameter's
    assert partition_spec(None, (16, 16), sizes) == PartitionSpec(None, None)
    assert fsdp_axis(PartitionSpec(None, None)) is None


@pytest.mark.parametrize(
    ("sizes", "filled"),
    [
        ((-1, 1, 1), (8, 1, 1)),
        ((1, -1, 2), (1, 4, 2)),
        ((2, 2, 1), (2, 2, 1)),
        ((-1, 4, 2), (1, 4, 2)),
    ],
)
def test_sizes_are_filled_from_the_devices(sizes, filled):
    assert MeshSizes(*sizes).filled(8) == filled


@pytest.mark.parametrize("sizes", [(9, 1, 1), (-1, 3, 1)])
def test_a_mesh_that_does_not_fit_is_refused_in_one_line(sizes):
    with pytest.raises(UserError) as error:
        make_mesh(*sizes)
    text = str(error.value)
    for part in (f"parallel.fsdp={sizes[1]}", "8 devices", "1 or 2 or 4 or 8"):
        assert part in text
    assert "\n" not in text
