"""The FP8 product compiled for an H200 on a machine without a GPU: which kernels
multiply, and of what dtypes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import quick
from for_h200 import (
    FP8_GEMM,
    MATRIX,
    assert_all_fp8,
    compiled_text,
    gemms,
    with_gradients,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from propagated import scalify

from scalify_core.array.scaled_array import ScaledArray
from scalify_core.numerics import compiler_hints
from scalify_core.ops.matmul import Fp8DotGeneral, Scaling, fp8_dot_general


@pytest.mark.parametrize(
    "dtype", quick([jnp.float16, jnp.bfloat16, jnp.float32], jnp.float16)
)
def test_forward_and_both_gradients_are_fp8_gemms(h200, dtype):
    text = compiled_text(
        h200,
        with_gradients(lambda x, w: fp8_dot_general(x, w, MATRIX)),
        (256, 128),
        (128, 512),
        dtype=dtype,
    )
    assert_all_fp8(text, forward=1, backward=2)


@pytest.mark.parametrize(
    ("lhs", "rhs", "dims"),
    [
        ((4, 64, 128), (128, 256), (((2,), (0,)), ((), ()))),
        ((64, 128), (256, 128), (((1,), (1,)), ((), ()))),
        ((4, 64, 128), (4, 128, 32), (((2,), (1,)), ((0,), (0,)))),
    ],
    ids=["leading axes", "transposed weight", "batch axis"],
)
def test_other_dimension_numbers_are_fp8_gemms_too(h200, lhs, rhs, dims):
    text = compiled_text(
        h200, with_gradients(lambda x, w: fp8_dot_general(x, w, dims)), lhs, rhs
    )
    assert_all_fp8(text, forward=1, backward=2)


@pytest.mark.parametrize(
    "scaling", [Scaling(2.0**3, 2.0**-7, 2.0**-12), Scaling("rms", "amax", "rms")]
)
def test_scales_keep_the_gemms_in_fp8(h200, scaling):
    dot = Fp8DotGeneral(scaling=scaling)
    text = compiled_text(
        h200, with_gradients(lambda x, w: dot(x, w, MATRIX)), (256, 128), (128, 512)
    )
    assert_all_fp8(text, forward=1, backward=2)


def test_a_power_of_two_after_the_product_becomes_its_alpha(h200):
    """A static scale costs no kernel: it is folded into the GEMM."""
    text = compiled_text(
        h200,
        lambda x, w: fp8_dot_general(x, w, MATRIX) * jnp.float16(2.0**-5),
        (256, 128),
        (128, 512),
    )
    assert_all_fp8(text, forward=1, backward=0)
    assert '"alpha_real":0.03125' in text


@pytest.mark.slow  # test_scanned_and_vmapped_products_take_their_constants
def test_scanned_layers_with_and_without_remat_are_fp8_gemms(h200):
    def layer(x, w):
        return jnp.tanh(fp8_dot_general(x, w, MATRIX)), None

    # Forward again in the backward pass under remat: one more product in the loop's
    # body.
    for body, forward in ((layer, 1), (jax.checkpoint(layer), 2)):
        text = compiled_text(
            h200,
            with_gradients(lambda x, w, body=body: lax.scan(body, x, w)[0]),
            (128, 128),
            (4, 128, 128),
        )
        assert_all_fp8(text, forward=forward, backward=2)


def test_a_vmapped_product_is_one_fp8_gemm(h200):
    fun = jax.vmap(lambda x, w: fp8_dot_general(x, w, MATRIX))
    text = compiled_text(h200, with_gradients(fun), (4, 64, 128), (4, 128, 256))
    assert_all_fp8(text, forward=1, backward=2)


@pytest.mark.parametrize(
    ("weight", "contracted"),
    quick(
        [(P(), 0), (P("fsdp", None), 0), (P(None, "fsdp"), 0), (P("fsdp", None), 1)],
        (P("fsdp", None), 1),
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "rows", [pytest.param((2048,), marks=pytest.mark.slow), (8, 256)]
)
def test_sharded_products_are_fp8_gemms(h200s, rows, weight, contracted):
    """Data parallel, and the weight sharded too, on either side of the product."""
    mesh = jax.sharding.Mesh(
        np.array(h200s).reshape(4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )
    dims = (((len(rows),), (contracted,)), ((), ()))
    fun = with_gradients(lambda x, w: fp8_dot_general(x, w, dims))
    shardings = [NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, weight)]
    text = compiled_text(
        shardings, fun, (*rows, 256), (256, 512) if contracted == 0 else (512, 256)
    )
    assert "all-reduce" in text or "reduce-scatter" in text
    assert_all_fp8(text, forward=1, backward=2)


def test_products_inside_shard_map_are_fp8_gemms(h200s):
    mesh = jax.sharding.Mesh(np.array(h200s), ("data",), axis_types=(AxisType.Auto,))
    shardings = [NamedSharding(mesh, P("data")), NamedSharding(mesh, P())]
    fun = jax.shard_map(
        lambda x, w: fp8_dot_general(x, w, MATRIX),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )
    text = compiled_text(shardings, with_gradients(fun), (2048, 256), (256, 512))
    assert_all_fp8(text, forward=1, backward=2)


def test_scaled_products_are_fp8_gemms(h200):
    """The whole of scale propagation, with gradients: the same three GEMMs."""

    def out_and_gradients(x, w):
        scaled = scalify(with_gradients(lambda x, w: fp8_dot_general(x, w, MATRIX)))
        out, gradients = scaled(ScaledArray(x, 2.0**-12), ScaledArray(w, 2.0**3))
        return out.data, [g.data for g in gradients]

    assert_all_fp8(
        compiled_text(h200, out_and_gradients, (256, 1024), (1024, 512)),
        forward=1,
        backward=2,
    )


def test_a_static_scale_is_the_alpha_of_the_gemm(h200):
    def product(x, w):
        return scalify(lambda x, w: fp8_dot_general(x, w, MATRIX))(
            ScaledArray(x, 2.0**-12), ScaledArray(w, 2.0**3)
        ).data

    text = compiled_text(h200, product, (256, 64), (64, 512))
    assert_all_fp8(text, forward=1, backward=0)
    assert '"alpha_real":0.125' in text  # 1 / sqrt(64)


def test_a_product_that_falls_back_is_seen_not_to_be_fp8(h200):
    """The check can fail."""
    with pytest.warns(UserWarning, match="multiples of 16"):
        text = compiled_text(
            h200,
            lambda x, w: Fp8DotGeneral("odd")(x, w, MATRIX),
            (256, 120),
            (120, 512),
        )
    assert gemms(text)
    assert not any(kernel == FP8_GEMM for kernel, _, _ in gemms(text))


def test_a_cast_there_and_back_is_seen_not_to_be_fp8(h200):
    def upcast(x, w):
        x8, w8 = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
        return lax.dot_general(x8.astype(x.dtype), w8.astype(w.dtype), MATRIX)

    text = compiled_text(h200, upcast, (256, 128), (128, 512))
    assert gemms(text)
    assert not any(kernel == FP8_GEMM for kernel, _, _ in gemms(text))


def test_the_default_backend_is_the_cpu_all_along(h200):
    assert jax.default_backend() == "cpu"
    text = (
        jax.jit(lambda x: fp8_dot_general(x, x, MATRIX))
        .lower(jnp.ones((16, 16)))
        .compile()
        .as_text()
    )
    assert "cublas" not in text


def scales_of_lhs(text):
    """The constants by which the GEMMs multiply their left operands."""
    constants = dict(re.findall(r"%(\S+) = f32\[\](?:\{\})? constant\((\S+)\)", text))
    calls = [
        line for line in text.splitlines() if f'custom_call_target="{FP8_GEMM}"' in line
    ]
    operands = [
        re.search(r"custom-call\(([^)]*)\)", line)[1].replace("%", "").split(", ")
        for line in calls
    ]
    return [
        float(next(constants[name] for name in names if name in constants))
        for names in operands
    ]


def compiled_as_trained(shardings, fun, *shapes, dtype=jnp.float16):
    """Optimised HLO of a program whose FP8 products take their constants."""
    with compiler_hints.scales_in_products():
        return compiled_text(
            shardings, fun, *shapes, dtype=dtype, **compiler_hints.PRODUCT_OPTIONS
        )


def in_turn(x, v, w, wrap=lambda f: f):
    product = wrap(lambda x, w: fp8_dot_general(x, w, MATRIX))
    fun = scalify(with_gradients(lambda x, v, w: product(product(product(x, v), w), w)))
    out, gradients = fun(
        ScaledArray(x, 2.0**-12), ScaledArray(v, 2.0**-3), ScaledArray(w, 2.0**-3)
    )
    return out.data, [g.data for g in gradients]


@pytest.mark.parametrize(
    ("wrap", "dtype"),
    quick(
        [
            (lambda f: f, jnp.float16),
            (lambda f: f, jnp.bfloat16),
            (lambda f: f, jnp.float32),
            (jax.jit, jnp.float16),
        ],
        (jax.jit, jnp.float16),
    ),
)
def test_equal_products_take_equal_constants_as_the_scales_of_their_operands(
    h200, wrap, dtype
):
    """Before their results are rounded; an FP16 one that still lacks it would
    overflow."""

    def products(x, v, w):
        return in_turn(x * 1, v, w, wrap)

    rows = 256 if wrap is not jax.jit else 512  # another program, which no cache has
    text = compiled_as_trained(
        h200, products, (rows, 64), (64, 64), (64, 64), dtype=dtype
    )
    actual = list(zip(*kernels_and_precisions(text), strict=True))
    assert actual.count((FP8_GEMM, "DEFAULT")) == 3
    assert actual.count((FP8_GEMM, "HIGHEST")) == 6
    assert len(actual) == len(gemms(text)) == 9
    assert set(scales_of_lhs(text)) == {2.0**-3, 2.0**-4}  # of 64 terms, and of rows
    assert set(re.findall(r'"alpha_real":([^,}]*)', text)) == {"1"}


def kernels_and_precisions(text):
    """Of each cuBLASLt product; the precision that is not the highest accumulates
    fast."""
    lines = [
        line for line in text.splitlines() if 'custom_call_target="__cublas' in line
    ]
    return (
        [re.search(r'custom_call_target="([^"]*)"', line)[1] for line in lines],
        [re.search(r'"operand_precision":\["(\w+)"', line)[1] for line in lines],
    )


def test_scanned_and_vmapped_products_take_their_constants(h200):
    layer = lambda x, w: (jnp.tanh(fp8_dot_general(x, w, MATRIX)), None)
    for body, products in ((layer, 3), (jax.checkpoint(layer), 4)):
        scanned = lambda x, w, body=body: lax.scan(body, x, w)[0]

        def on_data(x, w, scanned=scanned):
            out, gradients = scalify(with_gradients(scanned))(
                ScaledArray(x, 0.5), ScaledArray(w, 0.25)
            )
            return out.data, [g.data for g in gradients]

        text = compiled_as_trained(h200, on_data, (256, 64), (4, 64, 64))
        assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * products
        assert max(scales_of_lhs(text)) < 1

    def experts(x, w):
        mapped = jax.vmap(lambda x, w: fp8_dot_general(x, w, MATRIX))
        out, gradients = scalify(with_gradients(mapped))(
            ScaledArray(x, 0.5), ScaledArray(w, 0.25)
        )
        return out.data, [g.data for g in gradients]

    text = compiled_as_trained(h200, experts, (4, 256, 64), (4, 64, 64))
    assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * 3
    assert set(scales_of_lhs(text)) == {2.0**-3, 2.0**-4}


@pytest.mark.parametrize(
    "weight", quick([P(), P("fsdp", None), P(None, "fsdp")], P("fsdp", None)), ids=str
)
def test_sharded_products_take_their_constants(h200s, weight):
    mesh = jax.sharding.Mesh(
        np.array(h200s).reshape(4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )
    shardings = [NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, weight)]

    def on_data(x, w):
        out, gradients = scalify(
            with_gradients(lambda x, w: fp8_dot_general(x, w, MATRIX))
        )(ScaledArray(x, 0.5), ScaledArray(w, 0.25))
        return out.data, [g.data for g in gradients]

    text = compiled_as_trained(shardings, on_data, (2048, 256), (256, 512))
    assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * 3
    assert max(scales_of_lhs(text)) < 1
    assert set(re.findall(r'"alpha_real":([^,}]*)', text)) == {"1"}


def test_without_the_options_products_are_fp8_and_fp16_results_are_rounded_last(h200):
    text = compiled_text(h200, in_turn, (256, 64), (64, 64), (64, 64))
    assert_all_fp8(text, forward=3, backward=6)
    assert set(
        re.findall(rf'= \(?(\w+)\[.*custom_call_target="{re.escape(FP8_GEMM)}"', text)
    ) == {"f32"}


def test_products_in_bf16_are_written_in_bf16(h200):
    """Its range is FP32's: their constants are powers of two, which it holds."""

    def products(x, v, w):
        fun = scalify(
            lambda x, v, w: fp8_dot_general(fp8_dot_general(x, v, MATRIX), w, MATRIX)
        )
        return fun(ScaledArray(x, 1.0), ScaledArray(v, 1.0), ScaledArray(w, 1.0)).data

    text = compiled_text(
        h200, products, (256, 64), (64, 64), (64, 64), dtype=jnp.bfloat16
    )
    assert_all_fp8(text, forward=2, backward=0)
    written = re.findall(
        rf'= \(?(\w+)\[.* custom-call.*custom_call_target="{re.escape(FP8_GEMM)}"', text
    )
    assert written == ["bf16", "bf16"]
