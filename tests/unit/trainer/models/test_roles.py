"""Every parameter has its role, what an optimiser keeps of it finds it, and no other
room names a layer."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from scalify_core import as_scaled_array
from trainer.models.flops import linear_sizes
from trainer.models.model_functions import functions_of_module
from trainer.models.registry import SPECS, family_of
from trainer.models.roles import Role, role_of
from trainer.step.packing import pack, unpack

ROOT = Path(__file__).resolve().parents[4]
SIZES = {"vocab_size": 61, "context": 8, "n_layer": 2, "n_head": 2, "d_model": 16}
MODELS = [(family, scan) for family in SPECS for scan in (False, True)]


def build(family, scan, **choices):
    spec = spec_of(family, scan, **choices)
    return family_of(spec).build(spec)


def spec_of(family, scan, **choices):
    grouped = {} if family == "gpt2" else {"n_kv_head": 1}
    return SPECS[family](**SIZES, **grouped, scan_layers=scan, **choices)


@pytest.mark.parametrize(("family", "scan"), MODELS)
def test_every_parameter_has_a_role_that_its_shape_agrees_with(family, scan):
    model, spec = build(family, scan), spec_of(family, scan)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert shapes == model.shapes
    assert jax.tree.structure(shapes) == jax.tree.structure(model.roles)
    roles = jax.tree.leaves(model.roles)
    for shape, role in zip(jax.tree.leaves(shapes), roles, strict=True):
        assert shape.ndim - role.stacked == (2 if role.is_matrix else 1)
        assert role.stacked <= scan
        assert (role.layer is not None) == role.is_kernel
        assert role.padding == (shape.shape[0] - 61 if role.padding else 0)
    assert any(role.stacked for role in roles) == scan
    # those that patterns choose from
    layers = {role.layer for role in roles if role.is_kernel}
    assert layers == set(linear_sizes(spec))


@pytest.mark.parametrize(
    "transformation", [optax.adam(1.0), optax.adafactor(1.0), optax.contrib.muon(1.0)]
)
def test_moments_of_a_parameter_have_its_role_and_counts_have_none(transformation):
    model = build("gpt2", True)
    shapes = [leaf.shape for leaf in jax.tree.leaves(model.shapes)]
    roles = dict(zip(shapes, jax.tree.leaves(model.roles), strict=True))
    state = jax.eval_shape(transformation.init, model.shapes)
    seen = {
        leaf.shape: role_of(model.roles, path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    assert seen.pop(()) is None
    kernels = {shape: role for shape, role in seen.items() if len(shape) == 3}
    assert kernels
    assert kernels.items() <= roles.items()


def test_scaled_and_packed_moments_have_the_role_too():
    roles = {"h": {0: {"kernel": Role("column")}}}
    moments = as_scaled_array({"h": {0: {"kernel": jnp.ones((2, 2))}}})
    unpacked = unpack(pack({"mu": moments}))
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(unpacked)
    assert role_of(roles, path) == Role("column")
    assert role_of(roles, path[:-2]) is None  # a module


def test_a_parameter_without_a_role_is_named():
    class Custom(nnx.Module):
        def __init__(self, rngs):
            role = {"role": Role("column")}
            self.inner = nnx.Linear(2, 3, rngs=rngs, kernel_metadata=role)

    message = r"inner\.bias has no role; make it by nnx\.Param\(value, role=Role"
    with pytest.raises(ValueError, match=message):
        functions_of_module(Custom)


def test_rows_that_depend_on_the_batch_are_those_of_the_smoothed_mlp_alone():
    for mlp, names in (
        ("smooth_swiglu", {"h.0.mlp.c_proj", "h.1.mlp.c_proj"}),
        ("swiglu", set()),
    ):
        roles = jax.tree.leaves(build("gpt2", False, mlp=mlp).roles)
        assert {role.layer for role in roles if role.scaled_rows} == names


def test_no_other_room_names_a_layer():
    names = "wte|wpe|ln_f|c_attn|c_proj|c_fc|c_gate|c_value|lm_head|[a-z]+_proj"
    quoted = re.compile(rf"""["'.](?:{names})["'.]""")
    rooms = [p for p in (ROOT / "trainer").rglob("*.py") if "models" not in p.parts]
    for path in (*rooms, *(ROOT / "scripts").glob("*.py")):
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.S)
        assert quoted.findall(code) == [], path
    for line in ('x == "c_attn"', 'f"h.{i}.mlp.c_proj"', "'h.0.ln_f.scale'"):
        assert quoted.search(line)


@pytest.mark.parametrize(
    ("family", "scan", "mlp"),
    [
        ("gpt2", False, "smooth_swiglu"),
        ("llama", True, "swiglu"),
        ("gpt2", False, "gelu"),
    ],
)
def test_the_kernels_of_a_gated_layer_are_two_columns_and_a_row(family, scan, mlp):
    roles = jax.tree.leaves(build(family, scan, mlp=mlp).roles)
    kinds = sorted(role.kind for role in roles if role.gated)
    layers = {"smooth_swiglu": 2, "swiglu": 1, "gelu": 0}[mlp]
    assert kinds == sorted(["column", "column", "row"] * layers)
