"""FP8 products whose operands have any order, compiled for GPUs that are not there."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from scalify_core.numerics import compiler_hints
from scalify_core.ops.matmul import fp8_dot_general
from trainer.plan.aot import (
    compile_for_target,
    lower_for_target,
    make_target_mesh,
    no_compilation_cache,
)
from trainer.plan.targets import get_target
from trainer.step.kernels import takes_any_order


@pytest.mark.parametrize(
    ("name", "any_order"), [("h100", False), ("b200", True), ("rtx5090", False)]
)
def test_only_data_center_blackwell_needs_no_transposes(name, any_order):
    mesh = make_target_mesh(get_target(name), 1, 1)
    assert takes_any_order(mesh.devices.flat[0]) == any_order
    x, w = (
        jax.ShapeDtypeStruct(
            shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
        )
        for shape in ((512, 256), (256, 512))
    )

    def step(x, w):
        y, pull = jax.vjp(
            lambda x, w: fp8_dot_general(x, w, (((1,), (0,)), ((), ()))), x, w
        )
        return y, pull(jnp.sin(y))

    def lower():
        if not takes_any_order(mesh.devices.flat[0]):
            return jax.jit(step).lower(x, w)
        with compiler_hints.products_in_any_order():
            return jax.jit(step).lower(x, w)

    with no_compilation_cache():
        program = compile_for_target(lower_for_target(lower), {}).program
    assert [gemm.dtype for gemm in program.gemms] == ["fp8"] * 3
    transposes = [kernel for kernel in program.kernels if kernel.kind == "transpose"]
    assert bool(transposes) != any_order
