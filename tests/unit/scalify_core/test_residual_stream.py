"""GPT-2 with 48 layers in FP16 data, at initialisation: the data stays near RMS 1,
forward and backward.

As in the Scalify paper, the gradient is rescaled at the input of each layer norm, and
nowhere else. Weights have the size that gives a layer the gain it has in GPT-2 of width
768 with its deviation of 0.02.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from propagated import scalify

import scalify_core as sc
from scalify_core import as_scaled_array
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.debug.stats import summarize
from scalify_core.interpreter import registry
from scalify_core.interpreter.evaluator import evaluate
from scalify_core.interpreter.value import Value, narrow, value
from scalify_core.static import dynamic_rescale_rms, dynamic_rescale_rms_grad

L, B, T, D, H, V = 48, 2, 32, 32, 2, 64  # layers, batch, time, width, heads, vocabulary
STD = 0.02 * math.sqrt(768 / D)


def initial_params():
    """GPT-2's: normal weights, those of the 2 L branches' outputs smaller; biases zero,
    norms the identity."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * L + 2))

    def normal(*shape, std=STD):
        return std * jax.random.normal(next(keys), shape)

    def linear(d_in, d_out, std=STD):
        return {"kernel": normal(d_in, d_out, std=std), "bias": jnp.zeros(d_out)}

    def norm():
        return {"scale": jnp.ones(D), "bias": jnp.zeros(D)}

    small = STD / math.sqrt(2 * L)
    blocks = [
        {
            "ln_1": norm(),
            "c_attn": linear(D, 3 * D),
            "attn_out": linear(D, D, small),
            "ln_2": norm(),
            "c_fc": linear(D, 4 * D),
            "mlp_out": linear(4 * D, D, small),
        }
        for _ in range(L)
    ]
    return {"wte": normal(V, D), "wpe": normal(T, D), "h": blocks, "ln_f": norm()}


def layer_norm(x, p):
    return sc.functional.layer_norm(dynamic_rescale_rms_grad(x), p["scale"], p["bias"])


def dense(x, p):
    return x @ p["kernel"] + p["bias"][None]


def loss_fn(params, tokens):
    x = (
        sc.functional.embedding(params["wte"], tokens[:, :-1]) + params["wpe"][None]
    ).reshape(B * T, D)
    for p in params["h"]:
        qkv = jnp.split(dense(layer_norm(x, p["ln_1"]), p["c_attn"]), 3, axis=1)
        q, k, v = (y.reshape(B, T, H, D // H) for y in qkv)
        x = x + dense(sc.functional.attention(q, k, v).reshape(B * T, D), p["attn_out"])
        x = x + dense(
            sc.functional.gelu(dense(layer_norm(x, p["ln_2"]), p["c_fc"])), p["mlp_out"]
        )
    return sc.functional.linear_cross_entropy(
        layer_norm(x, params["ln_f"]), params["wte"], tokens[:, 1:].reshape(-1)
    )


def scaled_params():
    """FP16 data; static scales, those of the RMS."""
    return sc.tree.with_static_scales(
        as_scaled_array(initial_params(), dtype=jnp.float16)
    )


def tokens(seed=1):
    return jax.random.randint(jax.random.key(seed), (B, T + 1), 0, V)


@jax.jit
def rms(x):
    """RMS of the data, without the scale."""
    return summarize(sc.ScaledArray(x, 1.0)).rms


def gradient_by_equation(params, tokens):
    """The gradient of the loss, evaluated as `scalify` does, but equation by equation,
    nothing compiled as a whole."""
    leaves, tree = jax.tree.flatten((params, tokens), is_leaf=is_scaled_array)
    avals = [
        jax.ShapeDtypeStruct(x.shape, jnp.float32 if is_scaled_array(x) else x.dtype)
        for x in leaves
    ]
    traced = jax.jit(
        lambda *leaves: jax.grad(loss_fn)(*jax.tree.unflatten(tree, leaves))
    ).trace(*avals)
    return evaluate(
        traced.jaxpr,
        [value(x.data, x.scale) if is_scaled_array(x) else x for x in leaves],
    )


@pytest.fixture(scope="module")
def observed():
    """`[(where, RMS of the data)]` of what enters matmuls, sums and composites,
    whole-tensor; and the gradients.

    What enters the dynamic rescale is not stored before it, and statistics of rows are
    FP32: both are left out, and biases, which are zero.
    """
    entries = []

    def observe(rule, eqn, *operands, **kwargs):
        if eqn.primitive.name == "jit":
            return kwargs["evaluate"](eqn.params["jaxpr"], operands)
        name = (
            eqn.params["call"].name
            if eqn.primitive.name == "scalify_composite"
            else eqn.primitive.name
        )
        if not name.startswith("dynamic_rescale"):
            values = [
                x
                for x in operands
                if isinstance(x, Value) and len(x.shape) > 1 and x.dtype == jnp.float16
            ]
            entries.extend((name, float(rms(narrow(x).data))) for x in values)
        return rule.fun(eqn, *operands, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        composites = [
            name for name in registry.rules if name.startswith(registry.COMPOSITE)
        ]
        for name in ("jit", "dot_general", "add", "add_any", *composites):
            rule = registry.rules[name]
            patch.setitem(
                registry.rules,
                name,
                dataclasses.replace(rule, fun=functools.partial(observe, rule)),
            )
        gradients = gradient_by_equation(scaled_params(), tokens())
    return entries, gradients


@pytest.mark.slow  # creep, layer by layer: test_traps.py
@pytest.mark.parametrize(
    "name",
    [
        *(
            "dot_general",
            "add",
            "add_any",
            "layer_norm.fwd",
            "layer_norm.bwd",
            "attention.fwd",
            "attention.bwd",
        ),
        *(
            "gelu.fwd",
            "gelu.bwd",
            "embedding.bwd",
            "linear_cross_entropy.fwd",
            "linear_cross_entropy.bwd",
        ),
    ],
)
def test_data_that_enters_stays_near_one_over_48_layers(name, observed):
    sizes = np.asarray(
        [size for where, size in observed[0] if where == name and size > 0]
    )
    assert sizes.size >= (1 if name.startswith(("embedding", "linear")) else L)
    assert sizes.min() >= 1 / 4, (name, sizes.min())
    assert sizes.max() <= 4, (name, sizes.max())


@pytest.mark.slow  # a second program of 48 layers; one gradient: above
def test_accumulated_gradients_of_48_layers_are_stored_near_one(observed):
    """Rescaled where they are stored: sums over tokens, which are not independent,
    exceed what the rules expect."""
    # Every seventh: of all kinds (a layer has twelve), from all depths; all 580 would
    # take long to compile.
    gradients = [
        sc.ScaledArray(narrow(x).data, jnp.asarray(x.scale, jnp.float32))
        for x in observed[1][::7]
    ]

    def accumulate(total, new):
        return [dynamic_rescale_rms(t + n) for t, n in zip(total, new, strict=True)]

    total = [as_scaled_array(jnp.zeros(x.shape), dtype=jnp.float16) for x in gradients]
    add = jax.jit(scalify(accumulate))
    for turn in range(3):
        total = add(
            total,
            [
                sc.ScaledArray(x.data[::-1] if turn == 1 else x.data, x.scale)
                for x in gradients
            ],
        )
        sizes = np.asarray([rms(x.data) for x in total])
        assert sizes.min() >= 1 / 4
        assert sizes.max() <= 4
