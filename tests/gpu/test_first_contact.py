"""What only a GPU can tell: its products, its attention, its random bits, and that it
gives the same bits twice.

On a CPU the same checks run at a small size, so that they work the day there is a GPU.

Legend: B batch, T time, H heads, K head dim; N rows, D inputs, F outputs.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precisions import PRESETS, workload

from scalify_core import fp8_dot_general
from scalify_core.numerics.formats import FP16, counter_bits
from scalify_core.ops.functional import attention
from scalify_core.ops.functional.attention import Sees, _attention
from trainer.compiled.fp8 import Gpu, check_step
from trainer.compiled.hlo import Program
from trainer.config.composition import compose_config
from trainer.data import Batch
from trainer.models.gpt2.spec import GPT2Spec
from trainer.parallel.mesh import place_batch
from trainer.step.kernels import Kernels, gpu_options
from trainer.step.step import Hyper
from trainer.workload import compile_step, first_state

FOR_GPU = os.environ.get("SCALIFY_TEST_PLATFORM", "cpu") == "gpu"
# with some ten roundings on the way, of 2^-11 and 2^-8 each
FORMATS = {jnp.float16: 3e-3, jnp.bfloat16: 2e-2}


def apart(a, b):
    """The norm of the difference over that of `b`."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def on_cpu(fun, *args):
    """The same program, compiled for and run by the CPU beside the GPU."""
    cpu = jax.devices("cpu")[0]
    return jax.jit(fun)(*jax.device_put(args, cpu))


def options(on_gpu, kernels=Kernels.CACHED):
    policy = compose_config(["precision=scalify_fp8_fp16"]).precision.policy
    return gpu_options(policy, kernels) if on_gpu else None


def test_products_are_fp8_and_as_on_a_cpu(on_gpu):
    rows, inputs, outputs = (8192, 768, 3072) if on_gpu else (64, 128, 96)
    rng = np.random.default_rng(1)
    x, w, g = (
        rng.standard_normal(shape).astype(np.float16)
        for shape in ((rows, inputs), (inputs, outputs), (rows, outputs))
    )

    def products(x, w, g):
        out, pull = jax.vjp(
            lambda x, w: fp8_dot_general(x, w, (((1,), (0,)), ((), ()))), x, w
        )
        return out, *pull(g.astype(out.dtype))

    compiled = (
        jax.jit(products, compiler_options=options(on_gpu)).lower(x, w, g).compile()
    )
    if on_gpu:
        assert [gemm.kernel for gemm in Program(compiled.as_text()).gemms] == [
            "__cublas$lt$matmul$f8"
        ] * 3
    wide = (x.astype(np.float64), w.astype(np.float64), g.astype(np.float64))
    exact = (wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2])
    # An E4M3 operand is 31.5 dB from its numbers, one of E5M2 25.5 dB.
    for actual, there, right, limit in zip(
        compiled(x, w, g),
        on_cpu(products, x, w, g),
        exact,
        (0.045, 0.07, 0.07),
        strict=True,
    ):
        assert apart(actual, right) < limit
        assert apart(actual, there) < FORMATS[jnp.float16]


def drawn(on_gpu, dtype, seed=0):
    """Queries, keys, values and a gradient, [B, T, H, K], and segments [B, T]."""
    B, T, H, K = (4, 1024, 12, 64) if on_gpu else (1, 128, 2, 64)
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.standard_normal((B, T, H, K)), dtype) for _ in range(4)]
    return arrays, jnp.asarray(np.cumsum(rng.random((B, T)) < 4 / T, axis=1), jnp.int32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_attention_and_its_gradient_are_those_of_fp32(on_gpu, dtype, packed):
    arrays, segments = drawn(on_gpu, dtype)

    def both(q, k, v, g):
        out, pull = jax.vjp(
            lambda q, k, v: attention(q, k, v, segments=segments if packed else None),
            q,
            k,
            v,
        )
        return out, *pull(g)

    actual = jax.jit(both, compiler_options=options(on_gpu))(*arrays)
    right = jax.jit(both)(*(x.astype(jnp.float32) for x in arrays))
    assert max(apart(a, b) for a, b in zip(actual, right, strict=True)) < FORMATS[dtype]


@pytest.mark.parametrize("power", [-3, -5, -7])
def test_small_logits_do_not_lose_the_gradient_of_attention(on_gpu, power):
    """cuDNN multiplies by the logits' scale before it rounds to FP16; the program for
    CPUs does so afterwards."""
    (q, k, v, g), _ = drawn(on_gpu, jnp.float16)

    def gradients(q, k, v, g):
        scaled = lambda q, k, v: _attention(
            q, k, v, None, sees=Sees(True, None), logit_scale=2.0**power
        )
        return jax.vjp(scaled, q, k, v)[1](g)

    arrays = (q, k, v, 16 * g)
    actual = jax.jit(gradients, compiler_options=options(on_gpu))(*arrays)
    right = jax.jit(gradients)(*(x.astype(jnp.float32) for x in arrays))
    assert max(apart(a, b) for a, b in zip(actual, right, strict=True)) < 5e-3


def test_random_bits_and_what_they_round_to_are_those_of_a_cpu(on_gpu):
    size = 2**22 if on_gpu else 2**14
    x = np.random.default_rng(2).standard_normal(size).astype(np.float32) * np.float32(
        1e-3
    )

    def rounded(x):
        return FP16.stochastic_round(x, counter_bits(x.shape, 1, 2, 3))

    here = jax.jit(rounded, compiler_options=options(on_gpu))(x)
    assert (
        np.asarray(here).view(np.uint16)
        == np.asarray(on_cpu(rounded, x)).view(np.uint16)
    ).all()


def task(preset, on_gpu, kernels=Kernels.CACHED):
    spec = GPT2Spec(64, 32, n_layer=1, n_head=2, d_model=32)
    if on_gpu:
        spec = GPT2Spec(50257, 1024, n_layer=2, n_head=12, d_model=768)
    return workload(preset, spec=spec)._replace(kernels=kernels)


def trained(w, steps=4):
    """The losses of so many steps on one batch, the last state as bytes, and the
    compiled step."""
    spec = w.model.spec
    tokens = np.random.default_rng(0).integers(
        0, spec.vocab_size, (8, spec.context + 1), dtype=np.int32
    )
    batch = place_batch(Batch(tokens, None), accum=1, mesh=w.mesh)
    state = first_state(w, seed=0)
    step, losses = compile_step(w, batch, state), []
    for number in range(steps):
        state, metrics = step(
            state, batch, Hyper(np.float32(1e-3), np.int32(number), np.uint32(0))
        )
        losses.append(float(metrics["loss"]))
    return (
        losses,
        [
            np.asarray(x).tobytes()
            for x in jax.tree.leaves((state.params, state.opt_state))
        ],
        step,
    )


@pytest.fixture(scope="module")
def in_fp32(on_gpu):
    return trained(task("fp32", on_gpu))[0]


@pytest.mark.parametrize(
    "preset",
    [name for name in PRESETS if name not in ("sim", "scalify_mxfp8")]
    if FOR_GPU
    else ["scalify_fp8_fp16"],  # else: test_precision.py
)
@pytest.mark.slow  # on a CPU: test_precision.py
def test_every_precision_learns_as_fp32_does(on_gpu, in_fp32, preset):
    w = task(preset, on_gpu)
    losses, _, step = trained(w)
    assert losses[-1] < losses[0]
    # A loss scale begins where steps overflow, and a history of largest magnitudes
    # empty: the first steps differ.
    limit = (
        0.05
        if w.model.policy.method.loss_scale_skips or w.model.policy.method.has_history
        else 0.01
    )
    np.testing.assert_allclose(losses, in_fp32, rtol=limit)
    gpu = Gpu.from_device(w.mesh.devices.flat[0])
    if gpu is not None and gpu.is_for_fp8 and w.model.policy.forward is not None:
        spec = w.model.spec
        assert (
            check_step(
                w.model, Program(step.as_text()), 8 * spec.context, gpu, require=True
            ).share
            > 0
        )


# on a CPU golden runs have the same bits; it clears the caches that all tests share
@pytest.mark.slow
@pytest.mark.parametrize("kernels", [Kernels.CACHED, Kernels.FIXED][: 1 + FOR_GPU])
@pytest.mark.parametrize("preset", ["bf16", "scalify_fp8_fp16"][: 1 + FOR_GPU])
def test_the_same_steps_give_the_same_bits(on_gpu, preset, kernels):
    """Of two compilations: the second takes over what the first has measured, or
    nothing is measured."""
    w = task(preset, on_gpu, kernels)
    first = trained(w)
    jax.clear_caches()
    second = trained(w)
    assert first[0] == second[0]
    assert first[1] == second[1]
