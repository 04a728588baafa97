"""Products, loops and collectives of small programs, compiled for an H200."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from scalify_core import fp8_dot_general
from scalify_core.ops.functional import attention
from trainer.compiled.fp8 import (
    PRODUCTS,
    layer_products,
    missing_products,
    without_peeled,
)
from trainer.compiled.hlo import Program, fp8_share
from trainer.compiled.instructions import Shape, parse_instruction
from trainer.compiled.operations import Gemm
from trainer.plan.aot import OPTIONS, lower_for_target, make_target_mesh
from trainer.plan.targets import get_target

MATRIX = (((1,), (0,)), ((), ()))


@pytest.fixture(scope="module")
def mesh():
    return make_target_mesh(get_target("h200"), 8, 1)


def program(sharding, fun, *shapes, dtype=jnp.float16, **options):
    """Compiled on operands of these shapes; one sharding for all, or a list of one
    each."""
    shardings = sharding if isinstance(sharding, list) else [sharding] * len(shapes)
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=s)
        for shape, s in zip(shapes, shardings, strict=True)
    ]
    lowered = lower_for_target(lambda: jax.jit(fun).lower(*args))
    return Program(lowered.compile(compiler_options=OPTIONS | options).as_text())


@pytest.fixture(scope="module")
def one(mesh):
    return SingleDeviceSharding(mesh.devices.flat[0])


def test_a_product_in_fp8_and_its_gradients(one):
    def loss(x, w):
        return jnp.sum(jnp.square(fp8_dot_general(x, w, MATRIX).astype(jnp.float32)))

    p = program(one, jax.grad(loss, (0, 1)), (256, 64), (64, 512))
    # Long contractions are cut up into a batch of shorter ones.
    sizes = [sorted((g.sizes[1], g.sizes[2], g.sizes[0] * g.sizes[3])) for g in p.gemms]
    assert sizes == [[64, 256, 512]] * 3
    operands = [g.operands.count("f8e5m2") for g in p.gemms]
    assert sorted(operands) == [0, 1, 1]
    assert {(g.dtype, g.kernel) for g in p.gemms} == {("fp8", "__cublas$lt$matmul$f8")}
    assert sum(g.flops for g in p.gemms) == 3 * 2 * 256 * 64 * 512
    assert fp8_share(p) == 1
    assert sum(k.times for k in p.kernels if k.kind == "gemm") == 3


def test_the_content_of_a_loop_counts_in_each_iteration(one):
    def thrice(x, w):
        return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x), None

    def fun(x, w):
        return lax.scan(thrice, x, w)[0] @ w[0]

    shapes = (128, 256), (50, 256, 256)
    options = {"xla_gpu_enable_triton_gemm": False}
    p = program(one, fun, *shapes, dtype=jnp.bfloat16, **options)
    assert sorted(g.times for g in p.gemms) == [1, 150]
    assert sum(g.flops for g in p.gemms) == 151 * 2 * 128 * 256 * 256
    # Of the stack of weights an iteration reads its own.
    assert max(k.bytes for k in p.kernels) < 50 * 256 * 256 * 2


def test_the_content_of_a_loop_of_unknown_length_counts_once(one):
    def fun(x, w):
        return lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: jnp.tanh(x @ w), x)

    p = program(one, fun, (128, 256), (256, 256), dtype=jnp.bfloat16)
    assert [g.times for g in p.gemms] == [1]


def test_grouped_keys_and_values_reach_cudnn_attention_as_they_are(one):
    def loss(q, k, v):
        return jnp.sum(attention(q, k, v).astype(jnp.float32))

    queries, keys = (2, 256, 8, 64), (2, 256, 2, 64)
    gradients = jax.grad(loss, (0, 1, 2))
    p = program(one, gradients, queries, keys, keys, dtype=jnp.bfloat16)
    assert [(a.backward, a.causal, a.dtype, a.sizes) for a in p.attentions] == [
        (back, True, "bf16", (2, 8, 256, 256, 64)) for back in (False, True)
    ]
    # without cuDNN
    assert sum(a.flops for a in p.attentions) == (2 + 5) * 2 * 2 * 8 * 256 * 256 * 64
    assert p.gemms == []
    for call in p.entry.values():
        if "fmha" in call.target:
            arrays = [p.entry[name].shapes[0].dims for name in call.operands[:3]]
            sizes = sorted(map(math.prod, arrays))
            assert sizes == [math.prod(keys), math.prod(keys), math.prod(queries)]


def test_collectives_have_the_bytes_of_their_arrays(mesh):
    def per_device(x):
        everyone = lax.all_gather(x, "data", tiled=True)
        total = lax.psum(x.astype(jnp.float32), "data")
        share = lax.psum_scatter(everyone, "data", tiled=True)
        return everyone, total, share

    fun = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=(P(), P(), P("data")),
        check_vma=False,
    )
    p = program(NamedSharding(mesh, P("data")), fun, (8 * 64, 32))
    assert sorted(
        (c.op, c.dtype, c.bytes, c.devices, c.times) for c in p.collectives
    ) == [
        ("all-gather", "f16", 8 * 64 * 32 * 2, 8, 1),
        ("all-reduce", "f32", 64 * 32 * 4, 8, 1),
        ("reduce-scatter", "f16", 8 * 64 * 32 * 2, 8, 1),
    ]
    assert sum(k.kind == "collective" for k in p.kernels) == 3


def test_kinds_of_kernels(one):
    def fun(x):
        scale = jnp.sum(x[:1, :2]) * 2 + 1
        return jnp.sum(x, axis=1), x.T + 1, scale

    def kernels(fun):
        return program(one, fun, (512, 1024)).kernels

    assert {k.kind for k in kernels(fun)} >= {"reduce", "transpose", "tiny"}
    cast = lambda x: jnp.clip(x * 2, -448, 448).astype(jnp.float8_e4m3fn)
    assert [k.kind for k in kernels(cast)] == ["cast"]
    (kernel,) = kernels(lambda x: x + 1)
    assert (kernel.kind, kernel.bytes) == ("elementwise", 2 * 512 * 1024 * 2)


def test_an_instruction_with_a_tuple_and_quoted_parentheses():
    line = (
        "  ROOT %f.1 = (f16[8,2]{1,0:T(8,128)}, (s8[3]{0}, pred[])) custom-call(%a,"
        ' /*index=1*/%b.2), custom_call_target="x$y", metadata={op_name="jit(f)/(a"},'
        ' backend_config={"known_trip_count":{"n":"3"}}'
    )
    instruction = parse_instruction(line)
    assert instruction.opcode == "custom-call"
    assert instruction.operands == ("a", "b.2")
    assert instruction.shapes == (
        Shape("f16", (8, 2)),
        Shape("s8", (3,)),
        Shape("pred", ()),
    )
    assert instruction.bytes == 32 + 3 + 1
    assert (instruction.target, instruction.op_name, instruction.trip_count) == (
        "x$y",
        "jit(f)/(a",
        3,
    )


def test_bytes_of_three_elements():
    for dtype, size in (("f8e4m3fn", 3), ("bf16", 6), ("s4", 2), ("pred", 3)):
        assert Shape(dtype, (3,)).bytes == size
    assert Shape("token", (3,)).bytes == 0


def gemm(rows, columns, contracted):
    dtypes, sizes = ("f8e4m3fn",) * 2, (1, rows, columns, contracted)
    return Gemm(
        "__cublas$lt$matmul$f8", "fp8", dtypes, sizes, "", "", 1, accumulates=False
    )


def layer_of(tokens, inputs, outputs):
    products = layer_products((inputs, outputs), tokens)
    return dict(zip(PRODUCTS, products, strict=True))


def test_joined_products_are_told_apart_by_their_layers():
    """In Qwen3 two queries are as wide as queries, keys and values, and both branches
    of the MLP as a branch, queries and keys."""
    tokens, width, q, kv, f = 512, 64, 128, 64, 192
    layer = functools.partial(layer_of, tokens)
    attention = {
        "q_proj": layer(width, q),
        "k_proj": layer(width, kv),
        "v_proj": layer(width, kv),
        "o_proj": layer(q, width),
    }
    mlp = {name: layer(width, f) for name in ("gate_proj", "up_proj")}
    mlp["down_proj"] = layer(f, width)
    compiled = [gemm(tokens, q + 2 * kv, width), gemm(tokens, 2 * f, width)]
    compiled += [gemm(width, q + 2 * kv, tokens), gemm(width, 2 * f, tokens)]
    compiled += [gemm(tokens, width, n) for n in (q, kv, kv, f, f)]
    for inputs in (q, f):  # of what writes to the residual stream
        compiled += [
            gemm(tokens, width, inputs),
            gemm(tokens, inputs, width),
            gemm(inputs, width, tokens),
        ]
    assert missing_products([attention, mlp] * 2, compiled * 2) == set()
    lost = missing_products([attention, mlp], compiled[1:])
    output = PRODUCTS[0]
    assert lost == {attention[name][output] for name in ("q_proj", "k_proj")}
    # one more than the joined product holds
    more = {"x_proj": {output: attention["k_proj"][output]}}
    missing = missing_products([attention, mlp, more], compiled)
    assert missing == {attention["k_proj"][output]}


def test_a_repeated_forward_pass_does_not_stand_in_for_what_is_not_fp8():
    """All products of four equal layers but those of their weights have one size."""
    tokens, width = 512, 64
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention = {name: layer_of(tokens, width, width) for name in names}
    joined = [gemm(tokens, 3 * width, width)] * 2  # forward, and again
    weights = [gemm(width, 3 * width, tokens), gemm(width, width, tokens)]
    one = gemm(tokens, width, width)
    # of o_proj twice the output, and of all four layers the input's gradient
    assert missing_products([attention], joined + weights + [one] * 6) == set()
    missing = missing_products([attention], joined + weights + [one] * 4)
    assert missing == {attention["q_proj"][PRODUCTS[0]]}
    # With as many tokens as channels, output and weight gradient have one size.
    square = {name: layer_of(width, width, width) for name in names}
    products = [gemm(width, 3 * width, width)] * 2 + [gemm(width, width, width)] * 6
    assert missing_products([square], products) == set()


def test_an_iteration_that_was_taken_out_of_a_loop_does_not_stand_for_it():
    peeled, looped = (gemm(512, 64, 64)._replace(times=times) for times in (1, 11))
    wide = looped._replace(dtype="fp16")
    assert without_peeled([peeled, peeled, looped, looped]) == [looped] * 2
    assert without_peeled([peeled, wide]) == [wide]


IN_PLACE = """HloModule m

%update (p: f8e4m3fn[8,64,32], x: f8e4m3fn[32,64], i: s32[]) -> f8e4m3fn[32,8,64] {
  %p = f8e4m3fn[8,64,32]{1,0,2} parameter(0)
  %turned = f8e4m3fn[32,8,64]{2,1,0} bitcast(%p)
  %x = f8e4m3fn[32,64]{1,0} parameter(1)
  %row = f8e4m3fn[32,1,64]{2,1,0} bitcast(%x)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f8e4m3fn[32,8,64]{2,1,0} dynamic-update-slice(%turned, %row, %zero, %i, %zero)
}

ENTRY %main (s: f8e4m3fn[8,64,32], x: f8e4m3fn[32,64], i: s32[]) -> f8e4m3fn[32,8,64] {
  %s = f8e4m3fn[8,64,32]{1,0,2} parameter(0)
  %x = f8e4m3fn[32,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %fusion = f8e4m3fn[32,8,64]{2,1,0} fusion(%s, %x, %i), kind=kLoop, calls=%update
}
"""


def test_a_stack_that_is_updated_in_place_behind_a_bitcast_is_not_read():
    """Scanned layers stack FP8 data so; the whole stack was counted in every turn."""
    (kernel,) = Program(IN_PLACE).kernels
    assert kernel.bytes == 2 * 32 * 64 + 4  # the row is read and written; its place
