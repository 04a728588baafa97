"""Data-center Blackwell GPUs take FP8 operands in any layout."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from for_h200 import program_for

from scalify_core.numerics import compiler_hints
from scalify_core.ops.matmul import fp8_dot_general
from trainer.plan.aot import make_target_mesh
from trainer.plan.targets import get_target
from trainer.step.xla_flags import takes_any_layout


@pytest.mark.parametrize(("name", "any_layout"), [("b200", True), ("rtx5090", False)])
def test_only_data_center_blackwell_needs_no_transposes(name, any_layout):
    device = make_target_mesh(get_target(name), 1, 1).devices.flat[0]
    assert takes_any_layout(device) == any_layout

    def step(x, w):
        dot = lambda x, w: fp8_dot_general(x, w, (((1,), (0,)), ((), ())))
        y, vjp = jax.vjp(dot, x, w)
        return y, vjp(jnp.sin(y))

    shapes = ((512, 256), jnp.bfloat16), ((256, 512), jnp.bfloat16)
    hint = contextlib.nullcontext()
    if any_layout:
        hint = compiler_hints.products_in_any_layout(True)
    with hint:
        program = program_for(name, step, *shapes)
    assert [gemm.dtype for gemm in program.gemms] == ["fp8"] * 3
    kinds = {kernel.kind for kernel in program.kernels}
    assert ("transpose" in kinds) != any_layout
