"""`precision.attention=e4m3`: what it refuses before anything is built, and what a run
says of it."""

import re

import pytest

from trainer.cli.evaluate import policy_of
from trainer.config.composition import compose_config
from trainer.config.fields import flatten, to_tree
from trainer.errors import UserError
from trainer.models.custom import CustomSpec
from trainer.models.flops import attention_flops_per_token
from trainer.models.fp8_attention import check_fp8_attention
from trainer.models.registry import SPECS
from trainer.observe.precision_bisect import with_fp32_compute, without_low_precision
from trainer.report.messages import describe_precision
from trainer.step.xla_flags import (
    KernelChoice,
    check_deterministic,
    determinism_message,
)
from trainer.workload import Model

HEADS_OF_128 = ["model=llama_nano", "model.n_head=1", "model.n_kv_head=1"]
KEY = "precision.attention=e4m3"


def composed(*overrides):
    return compose_config([*HEADS_OF_128, KEY, *overrides])


def model_of(*overrides):
    c = composed(*overrides)
    return Model.make(c.model.spec(256), c.precision.policy)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision=bf16", "model.n_head=2"], "heads have 64 channels, .* take 128"),
        (["precision=bf16", "model.context=64"], "model.context=64 is not a multiple"),
        (
            ["precision=bf16", "data.document_mask=true"],
            "FP8 attention has no mask of documents; set data.document_mask=false",
        ),
    ],
)
def test_a_configuration_without_a_kernel_is_refused(overrides, message):
    with pytest.raises(UserError, match=f"{re.escape(KEY)}.*{message}"):
        model_of(*overrides)


def test_a_window_is_refused_unless_it_holds_all_keys():
    spec = SPECS["mistral"](
        vocab_size=256, context=256, n_head=1, n_kv_head=1, d_model=128, window=128
    )
    policy = composed("precision=bf16").precision.policy
    with pytest.raises(
        UserError, match=r"no sliding window, .* of 128 keys; set model"
    ):
        check_fp8_attention(spec, policy)
    check_fp8_attention(SPECS["gpt2"](256, context=128, n_head=6), policy)


def test_a_model_of_ones_own_is_refused():
    spec = CustomSpec(lambda build: None, 256, 128, keep_fp8_weights=True)
    policy = composed("precision=bf16").precision.policy
    with pytest.raises(UserError, match="a model of your own has its own attention"):
        check_fp8_attention(spec, policy)


def test_a_precision_alone_names_it_as_evaluate_does():
    """The default model, with which it is composed, has narrower heads."""
    assert policy_of("fp8_current+precision.attention=e4m3").attention == "e4m3"


def test_what_bisect_compares_with_has_attention_in_fp32():
    policy = composed("precision=scalify_fp8_fp16").precision.policy
    for other in (with_fp32_compute(policy), without_low_precision(policy)):
        assert other.attention is None


def test_simulated_attention_takes_any_size():
    model = model_of("precision=fp32", "precision.simulate=true", "model.n_head=2")
    assert not model.policy.has_fp8_attention
    assert "attention in e4m3 (simulated), " in describe_precision(model)


def test_a_run_says_the_format_of_attention_and_its_share_of_the_flops():
    spec = model_of("precision=bf16").spec
    assert attention_flops_per_token(spec) == 4 * 4 * 128 * 128
    assert describe_precision(model_of("precision=bf16")).startswith(
        "matmuls in bf16, attention in e4m3, 13% of the FLOPs; weights fp32"
    )
    assert (
        "84% of the FLOPs, attention in e4m3, 13% of the FLOPs; the rest and head in"
        " bf16" in describe_precision(model_of("precision=fp8_current"))
    )
    wide = compose_config([*HEADS_OF_128, "precision=fp8_current"])
    assert "; the rest, attention and head in bf16" in describe_precision(
        Model.make(wide.model.spec(256), wide.precision.policy)
    )


def test_a_saved_configuration_has_the_key_and_old_ones_lack_it():
    assert dict(flatten(to_tree(composed("precision=bf16"))))[
        "precision.attention"
    ] == ("e4m3")
    assert compose_config(["precision=bf16"]).precision.attention is None


def test_fp8_attention_is_fp8_enough_to_be_required():
    assert composed("precision=bf16", "precision.require_fp8=true")
    with pytest.raises(UserError, match="precision=fp32 has no FP8 matmuls"):
        composed(
            "precision=fp32", "precision.simulate=true", "precision.require_fp8=true"
        )


def test_a_gpu_run_says_that_its_backward_pass_is_not_deterministic():
    policy = composed("precision=bf16").precision.policy
    line = determinism_message(KernelChoice.FIXED, "gpu", None, has_fp8_attention=True)
    assert line.startswith("deterministic: no, with precision.attention")
    line = determinism_message(KernelChoice.FIXED, "cpu", None, has_fp8_attention=True)
    assert line.startswith("deterministic: yes")
    with pytest.raises(UserError, match=f"deterministic=true with {KEY}: XLA"):
        check_deterministic("true", policy)
    check_deterministic("auto", policy)
    check_deterministic("true", compose_config(["precision=bf16"]).precision.policy)
