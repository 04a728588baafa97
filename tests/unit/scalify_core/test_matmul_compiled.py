"""The FP8 product compiled for an H200 on a machine without a GPU: which kernels
multiply, and of what dtypes."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    ("lhs", "rhs", "dims"),
    [
        ((64, 128), (256, 128), (((1,), (1,)), ((), ()))),
        ((4, 64, 128), (4, 128, 32), (((2,), (1,)), ((0,), (0,)))),
    ],
    ids=["transposed weight", "batch axis"],
)
def test_forward_and_both_gradients_are_fp8_gemms(h200, lhs, rhs, dims):
    text = compiled_text(
        h200, with_gradients(lambda x, w: fp8_dot_general(x, w, dims)), lhs, rhs
    )
    assert_all_fp8(text, forward=1, backward=2)


def test_scales_keep_the_gemms_in_fp8(h200):
    dot = Fp8DotGeneral(scaling=Scaling("rms", "amax", 2.0**-12))
    text = compiled_text(
        h200, with_gradients(lambda x, w: dot(x, w, MATRIX)), (256, 128), (128, 512)
    )
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


def constants_of_products(text):
    """The constants by which the GEMMs multiply their operands; XLA may swap these."""
    constants = dict(re.findall(r"%(\S+) = f32\[\](?:\{\})? constant\((\S+)\)", text))
    calls = [
        line for line in text.splitlines() if f'custom_call_target="{FP8_GEMM}"' in line
    ]
    operands = [
        re.search(r"custom-call\(([^)]*)\)", line)[1].replace("%", "").split(", ")
        for line in calls
    ]
    return [
        math.prod(float(constants[name]) for name in names if name in constants)
        for names in operands
    ]


def compiled_as_trained(shardings, fun, *shapes, dtype=jnp.float16):
    """Optimised HLO of a program whose FP8 products take their constants."""
    with compiler_hints.scales_in_products():
        return compiled_text(
            shardings, fun, *shapes, dtype=dtype, **compiler_hints.PRODUCT_OPTIONS
        )


def test_equal_products_take_equal_constants_as_the_scales_of_their_operands(h200):
    """Before their results are rounded; an FP16 one that still lacks it would
    overflow."""
    product = jax.jit(lambda x, w: fp8_dot_general(x, w, MATRIX))

    def products(x, v, w):
        in_turn = lambda x, v, w: product(product(product(x, v), w), w)
        scales = (2.0**-12, 2.0**-3, 2.0**-3)
        args = map(ScaledArray, (x, v, w), scales)
        out, gradients = scalify(with_gradients(in_turn))(*args)
        return out.data, [g.data for g in gradients]

    text = compiled_as_trained(h200, products, (512, 64), (64, 64), (64, 64))
    actual = list(zip(*kernels_and_precisions(text), strict=True))
    assert actual.count((FP8_GEMM, "DEFAULT")) == 3
    assert actual.count((FP8_GEMM, "HIGHEST")) == 6
    assert len(actual) == len(gemms(text)) == 9
    # of 64 terms, and of rows
    assert set(constants_of_products(text)) == {2.0**-3, 2.0**-4}
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


def on_data(fun):
    """Of data at scales; the data of the result and of the gradients."""

    def run(x, w):
        args = ScaledArray(x, 0.5), ScaledArray(w, 0.25)
        out, gradients = scalify(with_gradients(fun))(*args)
        return out.data, [g.data for g in gradients]

    return run


def scanned(body):
    return lambda x, w: lax.scan(body, x, w)[0]


layer = lambda x, w: (jnp.tanh(fp8_dot_general(x, w, MATRIX)), None)


@pytest.mark.parametrize(
    ("fun", "rows", "products"),
    [
        (scanned(jax.checkpoint(layer)), (256,), 4),
        (jax.vmap(lambda x, w: fp8_dot_general(x, w, MATRIX)), (4, 256), 3),
    ],
    ids=["remat", "vmap"],
)
def test_scanned_and_vmapped_products_take_their_constants(h200, fun, rows, products):
    text = compiled_as_trained(h200, on_data(fun), (*rows, 64), (4, 64, 64))
    assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * products
    assert max(constants_of_products(text)) < 1
    if len(rows) > 1:
        assert set(constants_of_products(text)) == {2.0**-3, 2.0**-4}


def test_sharded_products_take_their_constants(h200s):
    """Data parallel, and the weight sharded too."""
    mesh = jax.sharding.Mesh(
        np.array(h200s).reshape(4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )
    specs = P(("data", "fsdp")), P("fsdp", None)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    fun = on_data(lambda x, w: fp8_dot_general(x, w, (((2,), (0,)), ((), ()))))
    text = compiled_as_trained(shardings, fun, (8, 256, 256), (256, 512))
    assert "all-reduce" in text or "reduce-scatter" in text
    assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * 3
    assert max(constants_of_products(text)) < 1
    assert set(re.findall(r'"alpha_real":([^,}]*)', text)) == {"1"}


def test_products_in_bf16_are_written_in_bf16(h200):
    """Its range is FP32's: their constants are powers of two, which it holds."""

    def products(*arrays):
        two = lambda x, v, w: fp8_dot_general(fp8_dot_general(x, v, MATRIX), w, MATRIX)
        return scalify(two)(*(ScaledArray(x, 1.0) for x in arrays)).data

    text = compiled_text(
        h200, products, (256, 64), (64, 64), (64, 64), dtype=jnp.bfloat16
    )
    assert_all_fp8(text, forward=2, backward=0)
    written = re.findall(
        rf'= \(?(\w+)\[.* custom-call.*custom_call_target="{re.escape(FP8_GEMM)}"', text
    )
    assert written == ["bf16", "bf16"]
