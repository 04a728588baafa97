"""The FP8 product compiled for an H200 on a machine without a GPU: which kernels multiply, and of what dtypes."""

import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from propagated import scalify

from scalify_core import lowering
from scalify_core.array import ScaledArray
from scalify_core.functional import gelu, layer_norm, materialised
from scalify_core.matmul import Fp8DotGeneral, Scaling, fp8_dot_general
from scalify_core.reductions import largest_magnitudes, sums_of_squares

pytestmark = pytest.mark.xdist_group(__name__)  # its tests share what one of them has made

MATRIX = (((1,), (0,)), ((), ()))
FP8_GEMM = "__cublas$lt$matmul$f8"
# As the trainer has its step compiled: a rounding is one, and a long contraction is one product.
AS_TRAINED = {"xla_allow_excess_precision": False, "xla_gpu_experimental_force_split_k": 1}


@pytest.fixture(scope="module")
def h200s():
    """A host of eight of the described GPUs. XLA's compiler for them comes with the packages of the extra `plan`."""
    for package in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13"):
        assert importlib.util.find_spec(package), f"{package} is missing: pip install .[plan] (make test does)"
    target = pathlib.Path(__file__).with_name("h200.txtpb").read_text()
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x8").devices


@pytest.fixture(scope="module")
def h200(h200s):
    return jax.sharding.SingleDeviceSharding(h200s[0])


def compiled_text(shardings, fun, *shapes, dtype=jnp.float16, **options):
    """Optimised HLO of `fun` on operands of these shapes; one sharding for all, or a list of one each."""
    shardings = shardings if isinstance(shardings, list) else [shardings] * len(shapes)
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=s) for shape, s in zip(shapes, shardings, strict=True)]
    return jax.jit(fun).lower(*args).compile(compiler_options={"xla_gpu_autotune_level": 0} | options).as_text()


def gemms(text):
    """(kernel, operand dtypes, algorithm) of every matrix product; Triton's and plain dots are found by name too."""
    found = []
    for line in text.splitlines():
        target = re.search(r'custom_call_target="(__cublas[^"]*|__triton[^"]*)"', line)
        if target:
            operands = re.search(r"custom-call\(([^)]*)\)", line)[1].replace("%", "").split(", ")[:2]
            dtypes = tuple(re.search(rf"%{re.escape(name)} = \(?(\w+)\[", text)[1] for name in operands)
            algorithm = re.search(r'"algorithm":"ALG_(?:DOT_)?(\w+)"', line)
            found.append((target[1], dtypes, algorithm[1] if algorithm else "UNSET"))
        elif re.search(r" dot\(|__triton_(nested_)?gemm", line):
            found.append(("dot", (), ""))
    return found


FORWARD = (FP8_GEMM, ("f8e4m3fn", "f8e4m3fn"), "ANY_F8_ANY_F8_F32_FAST_ACCUM")


def assert_all_fp8(text, *, forward, backward):
    """So many products of E4M3 with fast accumulation, so many of E4M3 and E5M2 without, and no other."""
    found = gemms(text)
    assert found.count(FORWARD) == forward, found
    gradients = [(k, a) for k, d, a in found if sorted(d) == ["f8e4m3fn", "f8e5m2"]]
    assert gradients.count((FP8_GEMM, "ANY_F8_ANY_F8_F32")) == backward, found
    assert len(found) == forward + backward, found


def with_gradients(fun):
    def both(*args):
        out, vjp = jax.vjp(fun, *args)
        return out, vjp(jnp.sin(out))

    return both


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_forward_and_both_gradients_are_fp8_gemms(h200, dtype):
    text = compiled_text(
        h200, with_gradients(lambda x, w: fp8_dot_general(x, w, MATRIX)), (256, 128), (128, 512), dtype=dtype
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
    text = compiled_text(h200, with_gradients(lambda x, w: fp8_dot_general(x, w, dims)), lhs, rhs)
    assert_all_fp8(text, forward=1, backward=2)


@pytest.mark.parametrize("scaling", [Scaling(2.0**3, 2.0**-7, 2.0**-12), Scaling("rms", "amax", "rms")])
def test_scales_keep_the_gemms_in_fp8(h200, scaling):
    dot = Fp8DotGeneral(scaling=scaling)
    text = compiled_text(h200, with_gradients(lambda x, w: dot(x, w, MATRIX)), (256, 128), (128, 512))
    assert_all_fp8(text, forward=1, backward=2)


def test_a_power_of_two_after_the_product_becomes_its_alpha(h200):
    """A static scale costs no kernel: it is folded into the GEMM."""
    text = compiled_text(
        h200, lambda x, w: fp8_dot_general(x, w, MATRIX) * jnp.float16(2.0**-5), (256, 128), (128, 512)
    )
    assert_all_fp8(text, forward=1, backward=0)
    assert '"alpha_real":0.03125' in text


def test_scanned_layers_with_and_without_remat_are_fp8_gemms(h200):
    def layer(x, w):
        return jnp.tanh(fp8_dot_general(x, w, MATRIX)), None

    # Forward again in the backward pass under remat: one more product in the loop's body.
    for body, forward in ((layer, 1), (jax.checkpoint(layer), 2)):
        text = compiled_text(
            h200, with_gradients(lambda x, w, body=body: lax.scan(body, x, w)[0]), (128, 128), (4, 128, 128)
        )
        assert_all_fp8(text, forward=forward, backward=2)


def test_a_vmapped_product_is_one_fp8_gemm(h200):
    fun = jax.vmap(lambda x, w: fp8_dot_general(x, w, MATRIX))
    text = compiled_text(h200, with_gradients(fun), (4, 64, 128), (4, 128, 256))
    assert_all_fp8(text, forward=1, backward=2)


@pytest.mark.parametrize(
    ("weight", "contracted"), [(P(), 0), (P("fsdp", None), 0), (P(None, "fsdp"), 0), (P("fsdp", None), 1)], ids=str
)
@pytest.mark.parametrize("rows", [(2048,), (8, 256)], ids=["rows", "batch and time"])
def test_sharded_products_are_fp8_gemms(h200s, rows, weight, contracted):
    """Data parallel, and the weight sharded too, on either side of the product."""
    mesh = jax.sharding.Mesh(np.array(h200s).reshape(4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    dims = (((len(rows),), (contracted,)), ((), ()))
    fun = with_gradients(lambda x, w: fp8_dot_general(x, w, dims))
    shardings = [NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, weight)]
    text = compiled_text(shardings, fun, (*rows, 256), (256, 512) if contracted == 0 else (512, 256))
    assert "all-reduce" in text or "reduce-scatter" in text
    assert_all_fp8(text, forward=1, backward=2)


def test_products_inside_shard_map_are_fp8_gemms(h200s):
    mesh = jax.sharding.Mesh(np.array(h200s), ("data",), axis_types=(AxisType.Auto,))
    shardings = [NamedSharding(mesh, P("data")), NamedSharding(mesh, P())]
    fun = jax.shard_map(
        lambda x, w: fp8_dot_general(x, w, MATRIX), mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    text = compiled_text(shardings, with_gradients(fun), (2048, 256), (256, 512))
    assert_all_fp8(text, forward=1, backward=2)


def test_scaled_products_are_fp8_gemms(h200):
    """The whole of scale propagation, with gradients: the same three GEMMs."""

    def out_and_gradients(x, w):
        scaled = scalify(with_gradients(lambda x, w: fp8_dot_general(x, w, MATRIX)))
        out, gradients = scaled(ScaledArray(x, 2.0**-12), ScaledArray(w, 2.0**3))
        return out.data, [g.data for g in gradients]

    assert_all_fp8(compiled_text(h200, out_and_gradients, (256, 1024), (1024, 512)), forward=1, backward=2)


def test_a_static_scale_is_the_alpha_of_the_gemm(h200):
    def product(x, w):
        return scalify(lambda x, w: fp8_dot_general(x, w, MATRIX))(
            ScaledArray(x, 2.0**-12), ScaledArray(w, 2.0**3)
        ).data

    text = compiled_text(h200, product, (256, 64), (64, 512))
    assert_all_fp8(text, forward=1, backward=0)
    assert '"alpha_real":0.125' in text  # 1 / sqrt(64)


def test_an_activation_writes_what_the_product_takes_in_both_orders(h200):
    """In one kernel: it is not transposed later from where it was kept."""

    def step(x, bias, w, gradient):
        hidden = lambda x, bias, w: fp8_dot_general(gelu(x, bias), w, MATRIX)
        out, pull = jax.vjp(hidden, x, bias, w)
        return out, pull(gradient)

    def on_data(x, bias, w, gradient):
        out, gradients = scalify(step)(*(ScaledArray(a, 1.0) for a in (x, bias, w, gradient)))
        return out.data, [g.data for g in gradients]

    text = compiled_text(h200, on_data, (4096, 1024), (1024,), (1024, 256), (4096, 256), **AS_TRAINED)
    assert_all_fp8(text, forward=1, backward=2)
    entry = text[text.index("ENTRY ") :]
    fusions = re.findall(r" = (\(.*?\)|\S+) fusion\(", entry)
    both = [out for out in fusions if "f8e4m3fn[4096,1024]" in out and "f8e4m3fn[1024,4096]" in out]
    assert len(both) == 1, fusions
    assert not [
        out for out in fusions if out.startswith("f8e4m3fn[4096,1024]") or out.startswith("f8e4m3fn[1024,4096]")
    ]


def written(text):
    """What each fusion of the program writes."""
    return re.findall(r" = (\(.*?\)|\S+) fusion\(", text[text.index("ENTRY ") :])


def test_the_gradient_of_an_activation_is_written_in_fp8_only_by_the_kernel_that_adds_up_its_rows(h200):
    def hidden(w, bias, v, x):
        return fp8_dot_general(gelu(fp8_dot_general(x, w, MATRIX), bias), v, MATRIX)

    def step(w, bias, v, x, gradient):
        return jax.vjp(lambda *parameters: hidden(*parameters, x), w, bias, v)[1](gradient)

    def on_data(*arrays):
        return [g.data for g in scalify(step)(*(ScaledArray(a, 1.0) for a in arrays))]

    shapes = (256, 1024), (1024,), (1024, 256), (4096, 256), (4096, 256)
    text = compiled_text(h200, on_data, *shapes, **AS_TRAINED)
    assert_all_fp8(text, forward=1, backward=3)
    found = [out for out in written(text) if "f8e5m2[4096,1024]" in out]
    assert len(found) == 1, written(text)
    assert re.search(r"f32\[\d+,1024\]", found[0]), found
    assert not [out for out in written(text) if "f16[4096,1024]" in out]


def test_the_gradients_of_a_layer_norm_read_its_statistics(h200):
    """No array of products is stored in FP32 to be added up, and both sums are made by one kernel, cut in two steps."""

    def step(x, weight, bias, gradient):
        y, pull = jax.vjp(layer_norm, x, weight, bias)
        return y, pull(jnp.sin(y) * gradient)

    text = compiled_text(h200, step, (8192, 768), (768,), (768,), (8192, 768), **AS_TRAINED)
    assert not [out for out in written(text) if "f32[8192,768]" in out]
    assert len([out for out in written(text) if re.findall(r"f32\[\d+,768\]", out)]) == 1, written(text)


def test_the_output_of_a_layer_norm_is_written_in_both_orders_by_one_kernel(h200):
    """At the width of GPT-2 124M XLA's estimate for it is 4 ns from that for two kernels."""

    def step(x, weight, bias, w, gradient):
        out, pull = jax.vjp(lambda *args: fp8_dot_general(layer_norm(*args[:3]), args[3], MATRIX), x, weight, bias, w)
        return out, pull(gradient)[3]

    def on_data(*arrays):
        return [y.data for y in scalify(step)(*(ScaledArray(a, 1.0) for a in arrays))]

    text = compiled_text(h200, on_data, (8192, 768), (768,), (768,), (768, 768), (8192, 768), **AS_TRAINED)
    assert_all_fp8(text, forward=1, backward=1)
    found = [out for out in written(text) if "f8e4m3fn[8192,768]" in out or "f8e4m3fn[768,8192]" in out]
    assert len(found) == 1, written(text)


def test_a_statistic_of_large_arrays_is_one_kernel_for_each_and_one_for_all(h200):
    statistics = lambda *arrays: (largest_magnitudes([arrays[:2], arrays[2:4]]), sums_of_squares(arrays[4:]))
    text = compiled_text(h200, statistics, *[(6400, 1600)] * 2, *[(8192, 3072)] * 2, *[(4800, 1600)] * 2, **AS_TRAINED)
    lengths = [out for out in written(text) if re.search(r"f32\[\d{3,}", out)]
    # Two pairs of maxima, each of one pass, and two sums; all else are scalars.
    assert sorted(out.replace("{0}", "") for out in lengths) == [
        "(f32[1024], f32[1024])",
        "(f32[2048], f32[2048])",
        "f32[512]",
        "f32[512]",
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_a_weight_that_is_kept_is_cast_once_in_both_orders(h200, kept):
    dot = Fp8DotGeneral(keep_rhs=kept)

    def step(x, w, gradient):
        out, pull = jax.vjp(lambda x, w: dot(x, w, MATRIX), x, w)
        return out, pull(gradient)

    def on_data(*arrays):
        out, gradients = scalify(step)(*(ScaledArray(a, 1.0) for a in arrays))
        return out.data, [g.data for g in gradients]

    text = compiled_text(h200, on_data, (8192, 768), (768, 2304), (8192, 2304), **AS_TRAINED)
    assert_all_fp8(text, forward=1, backward=2)
    orders = ("f8e4m3fn[2304,768]", "f8e4m3fn[768,2304]")
    found = [[order for order in orders if order in out] for out in written(text)]
    assert sorted(filter(None, found)) == ([[*orders]] if kept else [[order] for order in orders])


@pytest.mark.parametrize("scale", [1.0, None])
def test_what_is_materialised_is_a_barrier_of_its_format_on_a_gpu_only(scale):
    x = jnp.ones((4, 8), jnp.float16)
    x = x if scale is None else ScaledArray(x, scale)
    add = jax.jit(lambda x, y: jax.tree.leaves(scalify(lambda x, y: materialised(x + y))(x, y)))
    on = {platform: add.trace(x, x).lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")}
    assert re.search(r"optimization_barrier %\S+ : tensor<4x8xf16>", on["cuda"])
    assert "optimization_barrier" not in on["cpu"]


def test_a_product_that_falls_back_is_seen_not_to_be_fp8(h200):
    """The check can fail."""
    with pytest.warns(UserWarning, match="multiples of 16"):
        text = compiled_text(h200, lambda x, w: Fp8DotGeneral("odd")(x, w, MATRIX), (256, 120), (120, 512))
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
    text = jax.jit(lambda x: fp8_dot_general(x, x, MATRIX)).lower(jnp.ones((16, 16))).compile().as_text()
    assert "cublas" not in text


def scales_of_lhs(text):
    """The constants by which the GEMMs multiply their left operands."""
    constants = dict(re.findall(r"%(\S+) = f32\[\](?:\{\})? constant\((\S+)\)", text))
    calls = [line for line in text.splitlines() if f'custom_call_target="{FP8_GEMM}"' in line]
    operands = [re.search(r"custom-call\(([^)]*)\)", line)[1].replace("%", "").split(", ") for line in calls]
    return [float(next(constants[name] for name in names if name in constants)) for names in operands]


def compiled_as_trained(shardings, fun, *shapes, dtype=jnp.float16):
    """Optimised HLO of a program whose FP8 products take their constants."""
    with lowering.scales_in_products():
        return compiled_text(shardings, fun, *shapes, dtype=dtype, **lowering.PRODUCT_OPTIONS)


def in_turn(x, v, w, wrap=lambda f: f):
    product = wrap(lambda x, w: fp8_dot_general(x, w, MATRIX))
    fun = scalify(with_gradients(lambda x, v, w: product(product(product(x, v), w), w)))
    out, gradients = fun(ScaledArray(x, 2.0**-12), ScaledArray(v, 2.0**-3), ScaledArray(w, 2.0**-3))
    return out.data, [g.data for g in gradients]


@pytest.mark.parametrize(
    ("wrap", "dtype"),
    [(lambda f: f, jnp.float16), (lambda f: f, jnp.bfloat16), (lambda f: f, jnp.float32), (jax.jit, jnp.float16)],
    ids=["float16", "bfloat16", "float32", "jit"],
)
def test_equal_products_take_equal_constants_as_the_scales_of_their_operands(h200, wrap, dtype):
    """Before their results are rounded; an FP16 one that still lacks it would overflow."""

    def products(x, v, w):
        return in_turn(x * 1, v, w, wrap)

    rows = 256 if wrap is not jax.jit else 512  # another program, which no cache has
    text = compiled_as_trained(h200, products, (rows, 64), (64, 64), (64, 64), dtype=dtype)
    found = list(zip(*kernels_and_precisions(text), strict=True))
    assert found.count((FP8_GEMM, "DEFAULT")) == 3
    assert found.count((FP8_GEMM, "HIGHEST")) == 6
    assert len(found) == len(gemms(text)) == 9
    assert set(scales_of_lhs(text)) == {2.0**-3, 2.0**-4}  # of 64 terms, and of rows
    assert set(re.findall(r'"alpha_real":([^,}]*)', text)) == {"1"}


def kernels_and_precisions(text):
    """Of each cuBLASLt product; the precision that is not the highest accumulates fast."""
    lines = [line for line in text.splitlines() if 'custom_call_target="__cublas' in line]
    return (
        [re.search(r'custom_call_target="([^"]*)"', line)[1] for line in lines],
        [re.search(r'"operand_precision":\["(\w+)"', line)[1] for line in lines],
    )


def test_scanned_and_vmapped_products_take_their_constants(h200):
    layer = lambda x, w: (jnp.tanh(fp8_dot_general(x, w, MATRIX)), None)
    for body, products in ((layer, 3), (jax.checkpoint(layer), 4)):
        scanned = lambda x, w, body=body: lax.scan(body, x, w)[0]

        def on_data(x, w, scanned=scanned):
            out, gradients = scalify(with_gradients(scanned))(ScaledArray(x, 0.5), ScaledArray(w, 0.25))
            return out.data, [g.data for g in gradients]

        text = compiled_as_trained(h200, on_data, (256, 64), (4, 64, 64))
        assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * products
        assert max(scales_of_lhs(text)) < 1

    def experts(x, w):
        mapped = jax.vmap(lambda x, w: fp8_dot_general(x, w, MATRIX))
        out, gradients = scalify(with_gradients(mapped))(ScaledArray(x, 0.5), ScaledArray(w, 0.25))
        return out.data, [g.data for g in gradients]

    text = compiled_as_trained(h200, experts, (4, 256, 64), (4, 64, 64))
    assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * 3
    assert set(scales_of_lhs(text)) == {2.0**-3, 2.0**-4}


@pytest.mark.parametrize("weight", [P(), P("fsdp", None), P(None, "fsdp")], ids=str)
def test_sharded_products_take_their_constants(h200s, weight):
    mesh = jax.sharding.Mesh(np.array(h200s).reshape(4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    shardings = [NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, weight)]

    def on_data(x, w):
        out, gradients = scalify(with_gradients(lambda x, w: fp8_dot_general(x, w, MATRIX)))(
            ScaledArray(x, 0.5), ScaledArray(w, 0.25)
        )
        return out.data, [g.data for g in gradients]

    text = compiled_as_trained(shardings, on_data, (2048, 256), (256, 512))
    assert [kernel for kernel, _, _ in gemms(text)] == [FP8_GEMM] * 3
    assert max(scales_of_lhs(text)) < 1
    assert set(re.findall(r'"alpha_real":([^,}]*)', text)) == {"1"}


def test_without_the_options_products_are_fp8_and_fp16_results_are_rounded_last(h200):
    text = compiled_text(h200, in_turn, (256, 64), (64, 64), (64, 64))
    assert_all_fp8(text, forward=3, backward=6)
    assert set(re.findall(rf'= \(?(\w+)\[.*custom_call_target="{re.escape(FP8_GEMM)}"', text)) == {"f32"}


def test_products_in_bf16_are_written_in_bf16(h200):
    """Its range is FP32's: their constants are powers of two, which it holds."""

    def products(x, v, w):
        fun = scalify(lambda x, v, w: fp8_dot_general(fp8_dot_general(x, v, MATRIX), w, MATRIX))
        return fun(ScaledArray(x, 1.0), ScaledArray(v, 1.0), ScaledArray(w, 1.0)).data

    text = compiled_text(h200, products, (256, 64), (64, 64), (64, 64), dtype=jnp.bfloat16)
    assert_all_fp8(text, forward=2, backward=0)
    written = re.findall(rf'= \(?(\w+)\[.* custom-call.*custom_call_target="{re.escape(FP8_GEMM)}"', text)
    assert written == ["bf16", "bf16"]
