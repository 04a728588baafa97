"""Programs compiled for an H200 on a machine without a GPU, and the matrix products
that are found in them."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from trainer.plan.aot import (
    compile_for_target,
    lower_for_target,
    make_target_mesh,
    no_compilation_cache,
)
from trainer.plan.targets import get_target

MATRIX = (((1,), (0,)), ((), ()))
FP8_GEMM = "__cublas$lt$matmul$f8"
# As the trainer has its step compiled: a rounding is one, and a long contraction is one
# product.
AS_TRAINED = {
    "xla_allow_excess_precision": False,
    "xla_gpu_experimental_force_split_k": 1,
}


@functools.cache
def h200_devices():
    """A host of eight of the described GPUs."""
    return list(make_target_mesh(get_target("h200"), 8, 1).devices.flat)


def program_for(name, fun, *operands, **options):
    """The program of `fun` for one described GPU; operands are shapes and dtypes."""
    mesh = make_target_mesh(get_target(name), 1, 1)
    replicated = NamedSharding(mesh, PartitionSpec())
    args = [jax.ShapeDtypeStruct(*operand, sharding=replicated) for operand in operands]
    lowered = lower_for_target(lambda: jax.jit(fun).lower(*args))
    with no_compilation_cache():
        return compile_for_target(lowered, options).program


def compiled_text(shardings, fun, *shapes, dtype=jnp.float16, **options):
    """Optimised HLO of `fun` on operands of these shapes; one sharding for all, or a
    list of one each."""
    shardings = shardings if isinstance(shardings, list) else [shardings] * len(shapes)
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=s)
        for shape, s in zip(shapes, shardings, strict=True)
    ]
    return (
        jax.jit(fun)
        .lower(*args)
        .compile(compiler_options={"xla_gpu_autotune_level": 0} | options)
        .as_text()
    )


def compiled_for_a_gpu(step, args):
    """A jitted step, compiled quickly: the machine code is thrown away."""
    sharding = jax.sharding.SingleDeviceSharding(h200_devices()[0])
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    options = {
        "xla_gpu_autotune_level": 0,
        "xla_backend_optimization_level": 0,
        "xla_gpu_disable_gpuasm_optimizations": True,
    }
    return step.lower(*args).compile(compiler_options=options)


def gemms(text):
    """(kernel, operand dtypes, algorithm) of every matrix product; Triton's and plain
    dots are found by name too."""
    entries = []
    for line in text.splitlines():
        target = re.search(r'custom_call_target="(__cublas[^"]*|__triton[^"]*)"', line)
        if target:
            operands = (
                re.search(r"custom-call\(([^)]*)\)", line)[1]
                .replace("%", "")
                .split(", ")[:2]
            )
            dtypes = tuple(
                re.search(rf"%{re.escape(name)} = \(?(\w+)\[", text)[1]
                for name in operands
            )
            algorithm = re.search(r'"algorithm":"ALG_(?:DOT_)?(\w+)"', line)
            entries.append((target[1], dtypes, algorithm[1] if algorithm else "UNSET"))
        elif re.search(r" dot\(|__triton_(nested_)?gemm", line):
            entries.append(("dot", (), ""))
    return entries


FORWARD = (FP8_GEMM, ("f8e4m3fn", "f8e4m3fn"), "ANY_F8_ANY_F8_F32_FAST_ACCUM")


def assert_all_fp8(text, *, forward, backward):
    """So many products of E4M3 with fast accumulation, so many of E4M3 and E5M2
    without, and no other."""
    actual = gemms(text)
    assert actual.count(FORWARD) == forward, actual
    gradients = [(k, a) for k, d, a in actual if sorted(d) == ["f8e4m3fn", "f8e5m2"]]
    assert gradients.count((FP8_GEMM, "ANY_F8_ANY_F8_F32")) == backward, actual
    assert len(actual) == forward + backward, actual


def with_gradients(fun):
    def both(*args):
        out, vjp = jax.vjp(fun, *args)
        return out, vjp(jnp.sin(out))

    return both
