"""Programs around the FP8 product compiled for an H200: what their kernels write, and
how many there are."""

import re

import jax
import jax.numpy as jnp
import pytest
from for_h200 import AS_TRAINED, MATRIX, assert_all_fp8, compiled_text
from propagated import scalify

from scalify_core.array.scaled_array import ScaledArray
from scalify_core.numerics.amax import largest_magnitudes, sums_of_squares
from scalify_core.ops.functional import gelu, layer_norm, materialised
from scalify_core.ops.matmul import Fp8DotGeneral, fp8_dot_general


def test_an_activation_is_written_in_fp8_and_then_transposed(h200):
    """A kernel that writes both orders takes longer than two, on an H100."""

    def step(x, bias, w, gradient):
        hidden = lambda x, bias, w: fp8_dot_general(gelu(x, bias), w, MATRIX)
        out, pull = jax.vjp(hidden, x, bias, w)
        return out, pull(gradient)

    def on_data(x, bias, w, gradient):
        out, gradients = scalify(step)(
            *(ScaledArray(a, 1.0) for a in (x, bias, w, gradient))
        )
        return out.data, [g.data for g in gradients]

    text = compiled_text(
        h200, on_data, (4096, 1024), (1024,), (1024, 256), (4096, 256), **AS_TRAINED
    )
    assert_all_fp8(text, forward=1, backward=2)
    entry = text[text.index("ENTRY ") :]
    fusions = re.findall(r" = (\(.*?\)|\S+) fusion\(", entry)
    orders = ("f8e4m3fn[4096,1024]", "f8e4m3fn[1024,4096]")
    actual = [[order for order in orders if order in out] for out in fusions]
    assert sorted(filter(None, actual)) == sorted([order] for order in orders), fusions


def written(text):
    """What each fusion of the program writes."""
    return re.findall(r" = (\(.*?\)|\S+) fusion\(", text[text.index("ENTRY ") :])


def test_the_gradient_of_an_activation_is_written_in_fp8_only_by_the_kernel_that_adds_up_its_rows(
    h200,
):
    def hidden(w, bias, v, x):
        return fp8_dot_general(gelu(fp8_dot_general(x, w, MATRIX), bias), v, MATRIX)

    def step(w, bias, v, x, gradient):
        return jax.vjp(lambda *parameters: hidden(*parameters, x), w, bias, v)[1](
            gradient
        )

    def on_data(*arrays):
        return [g.data for g in scalify(step)(*(ScaledArray(a, 1.0) for a in arrays))]

    shapes = (256, 1024), (1024,), (1024, 256), (4096, 256), (4096, 256)
    text = compiled_text(h200, on_data, *shapes, **AS_TRAINED)
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


def test_the_output_of_a_layer_norm_is_written_in_fp8_and_then_transposed(h200):
    def step(x, weight, bias, w, gradient):
        out, pull = jax.vjp(
            lambda *args: fp8_dot_general(layer_norm(*args[:3]), args[3], MATRIX),
            x,
            weight,
            bias,
            w,
        )
        return out, pull(gradient)[3]

    def on_data(*arrays):
        return [y.data for y in scalify(step)(*(ScaledArray(a, 1.0) for a in arrays))]

    text = compiled_text(
        h200,
        on_data,
        (8192, 768),
        (768,),
        (768,),
        (768, 768),
        (8192, 768),
        **AS_TRAINED,
    )
    assert_all_fp8(text, forward=1, backward=1)
    orders = ("f8e4m3fn[8192,768]", "f8e4m3fn[768,8192]")
    actual = [[order for order in orders if order in out] for out in written(text)]
    assert sorted(filter(None, actual)) == sorted([order] for order in orders)


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


@pytest.mark.parametrize("kept", [True, False])
def test_a_weight_is_written_once_in_each_order(h200, kept):
    dot = Fp8DotGeneral(keep_rhs=kept)

    def step(x, w, gradient):
        out, pull = jax.vjp(lambda x, w: dot(x, w, MATRIX), x, w)
        return out, pull(gradient)

    def on_data(*arrays):
        out, gradients = scalify(step)(*(ScaledArray(a, 1.0) for a in arrays))
        return out.data, [g.data for g in gradients]

    text = compiled_text(
        h200, on_data, (8192, 768), (768, 2304), (8192, 2304), **AS_TRAINED
    )
    assert_all_fp8(text, forward=1, backward=2)
    orders = ("f8e4m3fn[2304,768]", "f8e4m3fn[768,2304]")
    actual = [[order for order in orders if order in out] for out in written(text)]
    assert sorted(filter(None, actual)) == [[order] for order in orders]


@pytest.mark.parametrize("scale", [1.0, None])
def test_what_is_materialised_is_a_barrier_of_its_format_on_a_gpu_only(scale):
    x = jnp.ones((4, 8), jnp.float16)
    x = x if scale is None else ScaledArray(x, scale)
    add = jax.jit(
        lambda x, y: jax.tree.leaves(scalify(lambda x, y: materialised(x + y))(x, y))
    )
    on = {
        platform: add.trace(x, x).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "cpu")
    }
    assert re.search(r"optimization_barrier %\S+ : tensor<4x8xf16>", on["cuda"])
    assert "optimization_barrier" not in on["cpu"]
