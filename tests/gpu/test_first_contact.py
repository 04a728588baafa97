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
from precisions import PRESETS, bits, step_inputs, workload

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
from trainer.precision.fp8_attention import fp8_attention
from trainer.step.xla_flags import KernelChoice, gpu_options
from trainer.workload import compile_step, first_state

FOR_GPU = os.environ.get("SCALIFY_TEST_PLATFORM", "cpu") == "gpu"
# with some ten roundings on the way, of 2^-11 and 2^-8 each
FORMATS = {jnp.float16: 3e-3, jnp.bfloat16: 2e-2}


def relative_error(a, b):
    """The norm of the difference over that of `b`."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def on_cpu(fun, *args):
    """The same program, compiled for and run by the CPU beside the GPU."""
    cpu = jax.devices("cpu")[0]
    return jax.jit(fun)(*jax.device_put(args, cpu))


def options(on_gpu, kernels=KernelChoice.CACHED):
    policy = compose_config(["precision=scalify_fp8_fp16"]).precision.policy
    return gpu_options(policy, kernels) if on_gpu else None


def test_products_are_fp8_and_as_on_a_cpu(on_gpu):
    N, D, F = (8192, 768, 3072) if on_gpu else (64, 128, 96)
    rng = np.random.default_rng(1)
    x, w, g = (
        rng.standard_normal(shape).astype(np.float16)
        for shape in ((N, D), (D, F), (N, F))
    )

    def products(x, w, g):
        dot = lambda x, w: fp8_dot_general(x, w, (((1,), (0,)), ((), ())))
        out, vjp = jax.vjp(dot, x, w)
        return out, *vjp(g.astype(out.dtype))

    step = jax.jit(products, compiler_options=options(on_gpu))
    compiled = step.lower(x, w, g).compile()
    if on_gpu:
        kernels = [gemm.kernel for gemm in Program(compiled.as_text()).gemms]
        assert kernels == ["__cublas$lt$matmul$f8"] * 3
    a, b, c = (array.astype(np.float64) for array in (x, w, g))
    exact = (a @ b, c @ b.T, a.T @ c)
    # An E4M3 operand is 31.5 dB from its numbers, one of E5M2 25.5 dB.
    limits = (0.045, 0.07, 0.07)
    results = (compiled(x, w, g), on_cpu(products, x, w, g), exact, limits)
    for actual, cpu, right, limit in zip(*results, strict=True):
        assert relative_error(actual, right) < limit
        assert relative_error(actual, cpu) < FORMATS[jnp.float16]


def drawn(on_gpu, dtype, seed=0):
    """Queries, keys, values and a gradient, [B, T, H, K], and segments [B, T]."""
    B, T, H, K = (4, 1024, 12, 64) if on_gpu else (1, 128, 2, 64)
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.standard_normal((B, T, H, K)), dtype) for _ in range(4)]
    return arrays, jnp.asarray(np.cumsum(rng.random((B, T)) < 4 / T, axis=1), jnp.int32)


def assert_near_fp32(on_gpu, fun, arrays, limit):
    """The results of a program of narrow arrays are those in FP32, within a limit."""
    actual = jax.jit(fun, compiler_options=options(on_gpu))(*arrays)
    right = jax.jit(fun)(*(x.astype(jnp.float32) for x in arrays))
    assert max(map(relative_error, actual, right)) < limit


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_attention_and_its_gradient_are_those_of_fp32(on_gpu, dtype, packed):
    arrays, segments = drawn(on_gpu, dtype)

    def both(q, k, v, g):
        attend = lambda q, k, v: attention(
            q, k, v, segments=segments if packed else None
        )
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(g)

    assert_near_fp32(on_gpu, both, arrays, FORMATS[dtype])


def test_fp8_attention_and_its_gradient_are_those_of_a_cpu(on_gpu):
    if on_gpu and (lack := Gpu.from_device(jax.devices()[0]).lacks_attention()):
        pytest.skip(lack)
    B, T, H, G, K = (4, 2048, 16, 4, 128) if on_gpu else (1, 128, 4, 2, 128)
    rng = np.random.default_rng(4)
    q, k, v, g = (
        jnp.asarray(rng.standard_normal((B, T, heads, K)), jnp.bfloat16)
        for heads in (H, G, G, H)
    )
    g = g + 1  # so the gradients of values are large sums

    def both(q, k, v, g):
        out, pull = jax.vjp(fp8_attention, q, k, v)
        return out, *pull(g)

    compiled = (
        jax.jit(both, compiler_options=options(on_gpu)).lower(q, k, v, g).compile()
    )
    if on_gpu:
        calls = Program(compiled.as_text()).attentions
        assert [call.dtype for call in calls] == ["fp8", "fp8"]
    right = on_cpu(both, q, k, v, g)
    # A second call must not see the maxima of a larger one, in buffers that cuDNN takes
    # for cleared.
    compiled(q.at[..., 0].add(12), k.at[:, 0, :, 0].add(12), 99 * v, 99 * g)
    # A kernel may round a probability before it divides by the sum of the row: two
    # roundings to E4M3 of 2^-4 / sqrt(3) each, at most.
    rounding = 2**0.5 * 2**-4 / 3**0.5
    # Hopper adds 32 products to a sum at a time, and cuts all 33 off below 2^-13 of it,
    # so by 2^-14 on average. Where all terms agree, the sum is on average half of what
    # it becomes, and a causal one has T / 2 terms.
    cut = T / 2 / 32 * 33 * 2**-14 / 2 if on_gpu else 0
    for actual, there in zip(compiled(q, k, v, g), right, strict=True):
        assert relative_error(actual, there) < (rounding**2 + cut**2) ** 0.5


@pytest.mark.parametrize("power", [-3, -7])
def test_small_logits_do_not_lose_the_gradient_of_attention(on_gpu, power):
    """cuDNN multiplies by the logits' scale before it rounds to FP16; the program for
    CPUs does so afterwards."""
    (q, k, v, g), _ = drawn(on_gpu, jnp.float16)
    settings = {"sees": Sees(True, None), "logit_scale": 2.0**power}

    def gradients(q, k, v, g):
        scaled = lambda q, k, v: _attention(q, k, v, None, **settings)
        return jax.vjp(scaled, q, k, v)[1](g)

    assert_near_fp32(on_gpu, gradients, (q, k, v, 16 * g), 5e-3)


def test_random_bits_and_what_they_round_to_are_those_of_a_cpu(on_gpu):
    size = 2**22 if on_gpu else 2**14
    x = 1e-3 * np.random.default_rng(2).standard_normal(size).astype(np.float32)

    def rounded(x):
        return FP16.stochastic_round(x, counter_bits(x.shape, 1, 2, 3))

    here = jax.jit(rounded, compiler_options=options(on_gpu))(x)
    assert np.asarray(here).tobytes() == np.asarray(on_cpu(rounded, x)).tobytes()


def task(preset, on_gpu, kernels=KernelChoice.CACHED):
    spec = GPT2Spec(64, 32, n_layer=1, n_head=2, d_model=32)
    if on_gpu:
        spec = GPT2Spec(50257, 1024, n_layer=2, n_head=12, d_model=768)
    return workload(preset, spec=spec)._replace(kernels=kernels)


def trained(w):
    """The losses of four steps on one batch, the bits of the last state, and the
    compiled step."""
    spec = w.model.spec
    shape = (8, spec.context + 1)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, shape, np.int32)
    batch = place_batch(Batch(tokens, None), accum=1, mesh=w.mesh)
    state = first_state(w, seed=0)
    step, losses = compile_step(w, batch, state), []
    for number in range(4):
        state, metrics = step(state, batch, step_inputs(number, 1e-3))
        losses.append(float(metrics["loss"]))
    return losses, bits((state.params, state.opt_state)), step


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
    method = w.model.policy.method
    limit = 0.05 if method.loss_scale_skips or method.has_history else 0.01
    np.testing.assert_allclose(losses, in_fp32, rtol=limit)
    gpu = Gpu.from_device(w.mesh.devices.flat[0])
    if gpu is not None and gpu.is_for_fp8 and w.model.policy.forward is not None:
        program, tokens = Program(step.as_text()), 8 * w.model.spec.context
        assert check_step(w.model, program, tokens, gpu, require=True).share > 0


# on a CPU golden runs have the same bits; it clears the caches that all tests share
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernels", [KernelChoice.CACHED, KernelChoice.FIXED][: 1 + FOR_GPU]
)
@pytest.mark.parametrize("preset", ["bf16", "scalify_fp8_fp16"][: 1 + FOR_GPU])
def test_the_same_steps_give_the_same_bits(on_gpu, preset, kernels):
    """Of two compilations: the second takes over what the first has measured, or
    nothing is measured."""
    w = task(preset, on_gpu, kernels)
    first = trained(w)[:2]
    jax.clear_caches()
    assert trained(w)[:2] == first
