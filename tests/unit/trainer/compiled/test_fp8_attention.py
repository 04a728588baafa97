"""FP8 attention in programs compiled for GPUs: its calls, and what is counted."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from for_h200 import AS_TRAINED, program_for

from trainer.compiled.fp8 import check_attention_device
from trainer.compiled.hlo import fp8_share
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.models import fp8_attention as models
from trainer.plan.aot import make_target_mesh
from trainer.plan.plan import Measured, StepPlan
from trainer.plan.targets import get_target
from trainer.precision import cudnn_fp8_attention
from trainer.precision.fp8_attention import fp8_attention

FP8_HEADS = [
    "model=llama_nano",
    "model.n_head=1",
    "model.n_kv_head=1",
    "precision=bf16",
    "precision.attention=e4m3",
]
SIMULATED = ["precision.simulate=true", "precision.attention=e4m3"]


def step_of(attend, target, shape=(2, 256, 4, 128)):
    """The program of attention over two heads of keys, and of its gradients."""

    def step(q, k, v, gradient):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(gradient)

    grouped = (*shape[:2], 2, shape[3])
    shapes = shape, grouped, grouped, shape
    return program_for(target, step, *((s, jnp.bfloat16) for s in shapes), **AS_TRAINED)


@pytest.mark.parametrize("target", ["h100", "b200"])
def test_both_passes_are_cudnn_calls_in_fp8(target):
    p = step_of(fp8_attention, target)
    assert [(a.dtype, a.backward, a.causal, a.sizes) for a in p.attentions] == [
        ("fp8", back, True, (2, 4, 256, 256, 128)) for back in (False, True)
    ]
    # The call at scales that the first one measured is not counted; it is there.
    targets = [i.target for c in p.computations.values() for i in c.values()]
    assert targets.count("__cudnn$fmhaSoftmaxF8") == 1
    assert targets.count("__cudnn$fmhaSoftmaxBackwardF8") == 2
    assert p.gemms == []
    assert fp8_share(p) == 1
    assert sum(k.times for k in p.kernels if k.kind == "attention") == 2


def test_nothing_but_scales_is_computed_beside_the_calls():
    """No tensor is copied, and none is stored in 16 bits on the way to a call."""
    p = step_of(fp8_attention, "h100")
    kinds = {kernel.kind for kernel in p.kernels}
    assert kinds <= {"attention", "reduce", "tiny", "cast", "elementwise"}
    for executed in p.executed:
        if "fmha" in executed.instruction.target:
            inputs = executed.instruction.operands[:3]
            dtypes = {executed.computation[name].shapes[0].dtype for name in inputs}
            assert dtypes == {"f8e4m3fn"}


def test_a_simulated_one_calls_nothing():
    attend = functools.partial(fp8_attention, simulate=True)
    p = step_of(attend, "h100", (1, 64, 2, 16))
    assert p.attentions == []
    assert {gemm.dtype for gemm in p.gemms} == {"fp32"}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 128, 2, 64), "heads of 64 channels, .* take 128 channels"),
        ((1, 192, 2, 128), "192 queries .* in training lengths of a multiple of 128"),
    ],
)
def test_sizes_without_a_kernel_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        step_of(fp8_attention, "h100", shape)


def test_another_jax_is_refused_where_a_gpu_would_need_it(monkeypatch):
    monkeypatch.setattr(cudnn_fp8_attention, "JAX_VERSION", "0.11.1")
    message = "private in JAX, and written for jax 0.11.1; jax [0-9.]* is installed"
    with pytest.raises(RuntimeError, match=message):
        step_of(fp8_attention, "h100", (1, 128, 2, 128))
    policy = compose_config(FP8_HEADS).precision.policy
    h100 = make_target_mesh(get_target("h100"), 1, 1).devices.flat[0]
    with pytest.raises(UserError, match=message):
        check_attention_device(h100, policy, is_described=True)
    check_attention_device(jax.devices("cpu")[0], policy)
    q = jnp.ones((1, 128, 1, 128))
    assert np.isfinite(fp8_attention(q, q, q)).all()


def test_gpus_that_cudnn_has_it_for():
    policy = compose_config(FP8_HEADS).precision.policy
    wide = compose_config(["precision=bf16"]).precision.policy
    for name in ("a100", "l40s", "h100", "h200", "b200", "b300", "rtx5090"):
        target = get_target(name)
        (device,) = make_target_mesh(target, 1, 1).devices.flat
        check_attention_device(device, wide, is_described=True)
        if name in ("h100", "h200", "b200", "b300"):
            check_attention_device(device, policy, is_described=True)
            continue
        major, minor = target.capability
        message = (
            f"precision.attention=e4m3: {target.device} has compute capability"
            f" {major}.{minor}, and cuDNN's FP8 attention needs 9.x or 10.x"
        )
        with pytest.raises(UserError, match=re.escape(message)):
            check_attention_device(device, policy, is_described=True)


def test_the_installed_cudnn_is_asked_where_the_kernel_runs(monkeypatch):
    policy = compose_config(FP8_HEADS).precision.policy
    simulated = compose_config([*FP8_HEADS[:3], "precision=fp32", *SIMULATED])
    (h100,) = make_target_mesh(get_target("h100"), 1, 1).devices.flat
    too_old = "cuDNN 91001 is installed; FP8 attention here needs 91002"
    monkeypatch.setattr(cudnn_fp8_attention, "wrong_cudnn", lambda major: too_old)
    with pytest.raises(UserError) as refused:
        check_attention_device(h100, policy)
    assert str(refused.value) == (
        f"precision.attention=e4m3: {too_old}; set precision.attention=null, the"
        " default"
    )
    check_attention_device(h100, policy, is_described=True)  # a plan
    check_attention_device(h100, simulated.precision.policy)
    check_attention_device(jax.devices("cpu")[0], policy)
    monkeypatch.setattr(cudnn_fp8_attention, "wrong_cudnn", lambda major: "")
    check_attention_device(h100, policy)


def test_a_cudnn_with_errors_is_refused(monkeypatch):
    class Versions:
        version = 91000
        cudnn_get_version = classmethod(lambda cls: cls.version)

    monkeypatch.setattr("jax._src.lib.cuda_versions", Versions)
    for major, least in ((9, 91002), (10, 91900)):
        Versions.version = least - 1
        assert cudnn_fp8_attention.wrong_cudnn(major) == (
            f"cuDNN {least - 1} is installed; FP8 attention here needs {least}"
        )
        Versions.version = least
        assert cudnn_fp8_attention.wrong_cudnn(major) == ""
    monkeypatch.setattr("jax._src.lib.cuda_versions", None)
    assert cudnn_fp8_attention.wrong_cudnn(9) == "cuDNN is not installed"


def test_the_configuration_asks_for_the_sizes_of_the_kernels():
    assert models.HEAD_WIDTH == cudnn_fp8_attention.HEAD_WIDTH
    assert models.LENGTH_MULTIPLE == cudnn_fp8_attention.LENGTH_MULTIPLE


def test_a_plan_counts_attention_in_fp8():
    flops = {("flops", "fp8"): 6.0, ("flops", "bf16"): 2.0}
    for dtype, share in (("fp8", 0.8), ("bf16", 0.6)):
        figures = flops | {("attention flops", dtype): 2.0}
        planned = SimpleNamespace(measured=Measured(figures, None, None))
        assert StepPlan.fp8_flop_share.fget(planned) == share
