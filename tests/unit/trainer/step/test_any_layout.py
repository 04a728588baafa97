"""FP8 products whose operands have any layout, compiled for GPUs that are not there."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from for_h200 import program_for

from scalify_core.numerics import compiler_hints
from scalify_core.ops.matmul import fp8_dot_general
from trainer.plan.aot import make_target_mesh
from trainer.plan.targets import get_target
from trainer.step.kernels import takes_any_layout


@pytest.mark.parametrize(
    ("name", "any_layout"), [("h100", False), ("b200", True), ("rtx5090", False)]
)
def test_only_data_center_blackwell_needs_no_transposes(name, any_layout):
    device = make_target_mesh(get_target(name), 1, 1).devices.flat[0]
    assert takes_any_layout(device) == any_layout

    def step(x, w):
        y, pull = jax.vjp(
            lambda x, w: fp8_dot_general(x, w, (((1,), (0,)), ((), ()))), x, w
        )
        return y, pull(jnp.sin(y))

    hint = contextlib.nullcontext()
    if takes_any_layout(device):
        hint = compiler_hints.products_in_any_layout()
    with hint:
        program = program_for(
            name, step, ((512, 256), jnp.bfloat16), ((256, 512), jnp.bfloat16)
        )
    assert [gemm.dtype for gemm in program.gemms] == ["fp8"] * 3
    transposes = [kernel for kernel in program.kernels if kernel.kind == "transpose"]
    assert bool(transposes) != any_layout
