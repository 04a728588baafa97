"""Programs around the FP8 product compiled for an H200: what their kernels write, and
how many there are."""

import re

import jax
import jax.numpy as jnp
import pytest
from for_h200 import AS_TRAINED, MATRIX, assert_all_fp8, compiled_text
from propagated import scalify

from scalify_core.array.scaled_array import ScaledArray, is_scaled_array
from scalify_core.numerics.amax import largest_magnitudes, sums_of_squares
from scalify_core.ops.functional import gelu, layer_norm, materialized
from scalify_core.ops.matmul import Fp8DotGeneral, fp8_dot_general


def written(text):
    """What each fusion of the program writes."""
    return re.findall(r" = (\(.*?\)|\S+) fusion\(", text[text.index("ENTRY ") :])


def on_data(step):
    """Of data at scale 1; the data of what comes out."""

    def run(*arrays):
        out = scalify(step)(*(ScaledArray(a, 1.0) for a in arrays))
        return [y.data for y in jax.tree.leaves(out, is_leaf=is_scaled_array)]

    return run


def with_gradients(fun, wanted=slice(None)):
    """Of operands and a gradient: the result and the gradients that are wanted."""

    def step(*args):
        out, pull = jax.vjp(fun, *args[:-1])
        return out, pull(args[-1])[wanted]

    return step


def product(x, w):
    return fp8_dot_general(x, w, MATRIX)


# What is multiplied, the shapes, the products of the backward pass, and which array of
# E4M3 is written in both orders. A kernel that writes both takes longer than two, on an
# H100.
WRITTEN = {
    "a layer norm": (
        with_gradients(lambda x, g, b, w: product(layer_norm(x, g, b), w), slice(3, 4)),
        ((8192, 768), (768,), (768,), (768, 768), (8192, 768)),
        1,
        (8192, 768),
    ),
    "a weight that is kept": (
        with_gradients(lambda x, w: Fp8DotGeneral(keep_rhs=True)(x, w, MATRIX)),
        ((8192, 768), (768, 2304), (8192, 2304)),
        2,
        (768, 2304),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_operand_is_written_in_fp8_and_then_transposed(h200, name):
    step, shapes, backward, (rows, columns) = WRITTEN[name]
    text = compiled_text(h200, on_data(step), *shapes, **AS_TRAINED)
    assert_all_fp8(text, forward=1, backward=backward)
    orders = (f"f8e4m3fn[{rows},{columns}]", f"f8e4m3fn[{columns},{rows}]")
    actual = [[order for order in orders if order in out] for out in written(text)]
    assert sorted(filter(None, actual)) == sorted([order] for order in orders)


def test_the_gradient_of_an_activation_is_written_in_fp8_only_by_the_kernel_that_adds_up_its_rows(
    h200,
):
    def step(w, bias, v, x, gradient):
        hidden = lambda w, bias, v: product(gelu(product(x, w), bias), v)
        return jax.vjp(hidden, w, bias, v)[1](gradient)

    shapes = (256, 1024), (1024,), (1024, 256), (4096, 256), (4096, 256)
    text = compiled_text(h200, on_data(step), *shapes, **AS_TRAINED)
    assert_all_fp8(text, forward=1, backward=3)
    actual = [out for out in written(text) if "f8e5m2[4096,1024]" in out]
    assert len(actual) == 1, written(text)
    assert re.search(r"f32\[\d+,1024\]", actual[0]), actual
    assert not [out for out in written(text) if "f16[4096,1024]" in out]


def test_the_gradients_of_a_layer_norm_read_its_statistics(h200):
    """No array of products is stored in FP32 to be added up, and both sums are made by
    one kernel, cut in two steps."""

    def step(x, weight, bias, gradient):
        y, pull = jax.vjp(layer_norm, x, weight, bias)
        return y, pull(jnp.sin(y) * gradient)

    text = compiled_text(
        h200, step, (8192, 768), (768,), (768,), (8192, 768), **AS_TRAINED
    )
    assert not [out for out in written(text) if "f32[8192,768]" in out]
    assert (
        len([out for out in written(text) if re.findall(r"f32\[\d+,768\]", out)]) == 1
    ), written(text)


def test_a_statistic_of_large_arrays_is_one_kernel_for_each_and_one_for_all(h200):
    statistics = lambda *arrays: (
        largest_magnitudes([arrays[:2], arrays[2:4]]),
        sums_of_squares(arrays[4:]),
    )
    text = compiled_text(
        h200,
        statistics,
        *[(6400, 1600)] * 2,
        *[(8192, 3072)] * 2,
        *[(4800, 1600)] * 2,
        **AS_TRAINED,
    )
    lengths = [out for out in written(text) if re.search(r"f32\[\d{3,}", out)]
    # Two pairs of maxima, each of one pass, and two sums; all else are scalars.
    assert sorted(out.replace("{0}", "") for out in lengths) == [
        "(f32[1024], f32[1024])",
        "(f32[2048], f32[2048])",
        "f32[512]",
        "f32[512]",
    ]


@pytest.mark.parametrize("scale", [1.0, None])
def test_what_is_materialized_is_a_barrier_of_its_format_on_a_gpu_only(scale):
    x = jnp.ones((4, 8), jnp.float16)
    x = x if scale is None else ScaledArray(x, scale)
    add = jax.jit(
        lambda x, y: jax.tree.leaves(scalify(lambda x, y: materialized(x + y))(x, y))
    )
    on = {
        platform: add.trace(x, x).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "cpu")
    }
    assert re.search(r"optimization_barrier %\S+ : tensor<4x8xf16>", on["cuda"])
    assert "optimization_barrier" not in on["cpu"]
