"""What a precision refuses, and what it says of itself."""

import dataclasses
import re

import pytest
from precisions import SPEC, abstract, policy, workload

from trainer.errors import UserError
from trainer.models.flops import linear_sizes
from trainer.models.llama.spec import LlamaSpec
from trainer.parallel.mesh import abstract_batch
from trainer.precision.arrays import skipped_matmuls
from trainer.report.messages import describe_idle, describe_precision
from trainer.workload import (
    Model,
    abstract_state,
    lower_step,
)


def test_layers_that_are_not_fp8_are_named_with_the_reason():
    spec = dataclasses.replace(SPEC, d_mlp=40)
    w = workload("scalify_fp8", spec=spec)
    assert w.model.narrow == ["h.0.attn.c_attn", "h.0.attn.c_proj"]
    lines = describe_precision(w.model)
    assert "2 of 4 linear layers in e4m3/e5m2" in lines
    assert "(h.0.mlp.c_fc: 32 x 40 are not multiples of 16)" in lines
    # Its products take any number of rows, but no other widths.
    assert Model.make(spec, policy("fp8_delayed")).narrow == w.model.narrow
    # with warnings as errors: nothing is skipped while it is traced
    text = lower_step(w, abstract(w)).as_text()
    shapes = re.findall(r"convert.*-> tensor<(\d+)x(\d+)xf8E4M3FN>", text)
    assert shapes
    assert not any("40" in shape for shape in shapes)
    patterns = {"fp8_modules": ("h.*",), "exclude": ("h.0.attn.*",)}
    excluded = Model.make(SPEC, policy("scalify_fp8", **patterns)).skipped
    names = ("h.0.attn.c_attn", "h.0.attn.c_proj")
    assert excluded == dict.fromkeys(names, "in precision.exclude")


def test_a_wide_forward_pass_is_nvfp4s_and_not_any_16_bit_format_in_blocks():
    assert policy("nvfp4_wide_forward").has_wide_forward
    in_blocks = policy("mxfp8", compute="fp32", simulate=True, forward="bf16")
    assert not in_blocks.has_wide_forward


def test_a_loop_over_layers_stacks_gradients_in_one_byte():
    """Those that are added up have more: the golden run `accum`."""
    spec = LlamaSpec(
        vocab_size=64,
        context=16,
        n_layer=3,
        n_head=2,
        n_kv_head=2,
        d_model=32,
        scan_layers=True,
    )
    w = workload("scalify_fp8_fp8", spec=spec)
    loops = re.findall(
        r"stablehlo.while.*?: (.*)", lower_step(w, abstract(w)).as_text()
    )
    in_bytes = [len(re.findall(r"tensor<3x\d+x\d+xf8E5M2>", types)) for types in loops]
    assert max(in_bytes) == len(linear_sizes(spec))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": "e9m9"}, r"precision\.forward=e9m9"),
        ({"forward": "e3m4", "backward": "e5m2"}, "simulate=true"),
        ({"forward": "e4m3"}, "give both"),
        ({"clip_outliers": 6.0}, "no matmul is"),
        ({"hadamard": 512}, "precision.hadamard=512: expected at most 256"),
        ({"backward_e4m3": ("h.*",)}, "precision.backward_e4m3 needs FP8 matmuls"),
        ({"scaling": "delayed"}, "scales FP8 matmuls"),
        ({"weights": "fp16"}, "needs precision.scaling=propagate"),
        ({"scaling": "propagate", "compute": "fp16"}, "weight_grad=fp32"),
        ({"simulate": True, "compute": "bf16"}, "it needs compute=fp32"),
        ({"rescale_grads": ("head",)}, "rescale_grads=.*: expected .* layer_norm, qkv"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        policy("fp32", **changes)


@pytest.mark.parametrize(
    ("preset", "changes", "message", "valid"),
    [
        ("fp32", {"weight_grad": "bf16"}, "bf16, but no matmul is narrower", "fp32"),
        ("bf16", {"weights": "bf16"}, "fp32, but precision.weights=bf16", "bf16"),
        (
            "scalify_fp16",
            {"weight_grad": "e5m2"},
            "e5m2, but gradients are propagated in precision.compute=fp16",
            "fp16",
        ),
        (
            "scalify_fp8",
            {"weight_grad": "fp32"},
            "fp32, but gradients are propagated",
            "fp16 or bf16 or e4m3 or e5m2",
        ),
        (
            "fp8_current",
            {"weight_grad": "e5m2"},
            "e5m2, but without precision.scaling=propagate",
            "fp32 or bf16",
        ),
    ],
)
def test_weight_gradients_that_nothing_would_compute_are_refused(
    preset, changes, message, valid
):
    error = f"precision.weight_grad={message}.*; set precision.weight_grad={valid}$"
    with pytest.raises(UserError, match=error):
        policy(preset, **changes)
    if preset != "scalify_fp16":
        advised = changes | {"weight_grad": valid.split()[-1]}
        described = policy(preset, **advised).describe_gradients(is_narrow=True)
        assert described == advised["weight_grad"]


def test_gradients_in_e4m3_need_scales_of_their_own():
    with pytest.raises(
        UserError, match="scaling=propagate or current; found e4m3, e5m2 and delayed"
    ):
        policy("fp8_delayed", backward_e4m3=("h.*",))
    with pytest.raises(
        UserError, match=r"rounds to nearest, not as precision\.backward=e5m2s does"
    ):
        policy("sim", scaling="propagate", backward="e5m2s", backward_e4m3=("h.*",))
    with pytest.raises(UserError, match="found e4m3, e5m2 and none"):
        policy("fp8_current", scaling="none", backward_e4m3=("h.*",))


def test_the_start_up_line_says_how_operands_gradients_and_weights_are_rounded():
    def lines(preset, **changes):
        return describe_precision(Model.make(SPEC, policy(preset, **changes)))

    e4m3 = {"backward_e4m3": ("h.*.mlp.*",)}
    assert "4 of 4 linear layers in e4m3/e5m2 (gradients of 2 in e4m3)" in lines(
        "scalify_fp8", **e4m3
    )
    assert "2 of 4 linear layers in e4m3/e5m2 (gradients of 0 in e4m3)" in lines(
        "scalify_fp8", **e4m3, exclude=("h.*.mlp.*",)
    )
    assert "clipped" not in lines("scalify_fp8")
    clipped = "operands clipped at 6 times their RMS, Hadamard-transformed in groups of"
    assert clipped in lines("scalify_fp8", hadamard=16, clip_outliers=6.0)
    for rounding in ("nearest", "kahan"):
        weights = f"; weights bf16 (rounding: {rounding}), weight gradients"
        assert weights in lines("bf16_pure", weights_rounding=rounding)
    delayed = (
        "weight gradients rounded to bf16 by Flax's product, kept in fp32, moments"
    )
    assert delayed in lines("fp8_delayed")


@pytest.mark.parametrize(
    ("preset", "key"),
    [
        ("scalify_fp8", "fp8_modules"),
        ("bf16", "exclude"),
        ("scalify_fp8", "backward_e4m3"),
    ],
)
def test_a_pattern_without_a_match_is_refused(preset, key):
    message = (
        rf"precision\.{key}: no matmul matches 'layer\.\*'; there are"
        r" h\.0\.attn\.c_attn"
    )
    with pytest.raises(UserError, match=message):
        Model.make(SPEC, policy(preset, **{key: ("layer.*",)}))


def test_an_override_that_changes_nothing_is_named():
    given = ["precision.amax_history=3", "precision.exclude=[h.0.*]"]
    assert describe_idle(policy("bf16"), given) == [
        (
            "precision.exclude has no effect here: no matmul is narrower than"
            " precision.compute=bf16"
        ),
        (
            "precision.amax_history has no effect here: precision.scaling=none, not"
            " delayed"
        ),
    ]
    assert describe_idle(policy("fp8_delayed"), given) == []


def test_rows_that_fp8_does_not_take_leave_nothing_narrow():
    w = workload("scalify_fp8_fp16")
    spec = dataclasses.replace(SPEC, context=24)
    w = w._replace(model=Model.make(spec, w.model.policy, rows=24))
    assert w.model.narrow == []
    assert w.in_precision(w.model.policy).model.narrow == []
    lines = describe_precision(w.model)
    assert "0 of 4 linear layers in e4m3/e5m2, 0% of the FLOPs" in lines
    assert "(all: micro-batches of 24 tokens a device, not a multiple of 16)" in lines
    tokens = abstract_batch(1, 1, 24, document_mask=False, mesh=w.mesh)
    # with warnings as errors: nothing tries to be FP8
    assert "f8E" not in lower_step(w, tokens, abstract_state(w)).as_text()
    others = [policy("fp8_delayed"), policy("sim", forward="e4m3", backward="e5m2")]
    assert [len(Model.make(SPEC, other, rows=24).narrow) for other in others] == [4, 4]


@pytest.mark.parametrize(
    ("blocks", "first", "last"), [(3, 1, 1), (12, 1, 2), (32, 2, 5), (62, 2, 8)]
)
def test_nvfp4_keeps_first_and_last_blocks_wide(blocks, first, last):
    """Of 62 blocks NVIDIA keeps the first two and the last eight."""
    sizes = linear_sizes(dataclasses.replace(SPEC, n_layer=blocks))
    for preset in ("nvfp4", "nvfp4_wide_forward"):
        skipped = skipped_matmuls(policy(preset), sizes)
        narrow = {int(path.split(".")[1]) for path in sizes.keys() - skipped}
        assert narrow == set(range(first, blocks - last))
        assert set(skipped.values()) == {"in precision.wide_ends"}
    every = skipped_matmuls(policy("nvfp4", wide_ends=None), sizes)  # of earlier runs
    assert not every


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"n_layer": 2},
            "leaves none of 2 blocks in e2m1; set precision.wide_ends=null",
        ),
        ({"n_layer": 9, "scan_layers": True}, "needs blocks that are not scanned: set"),
    ],
)
def test_wide_ends_that_cannot_be_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        skipped_matmuls(
            policy("nvfp4"), linear_sizes(dataclasses.replace(SPEC, **changes))
        )
    with pytest.raises(UserError, match=r"precision\.wide_ends.*expected two shares"):
        policy("nvfp4", wide_ends=(0.5,))
