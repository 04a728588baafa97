"""Plans: the arithmetic, the command's answers to bad input, and the plan of a small
model whose step is compiled."""

import dataclasses
import importlib.metadata
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.assembly.build import build_model, check_fp8
from trainer.cli import plan as script
from trainer.compiled.classes import FP8, GAPS
from trainer.compiled.fp8 import (
    Gpu,
    Layer,
    check_device,
    check_step,
    layer_products,
    not_fp8,
)
from trainer.compiled.operations import Collective, Gemm
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.models.gpt2.model import functional
from trainer.models.gpt2.spec import GPT2Spec, linear_sizes
from trainer.observe.peaks import peak_flops
from trainer.plan import aot, plan
from trainer.plan.aot import live_at_peak, make_target_mesh
from trainer.plan.figures import Hardware, collective_seconds, extrapolate, gemm_seconds
from trainer.plan.plan import is_extrapolated
from trainer.plan.targets import TARGETS, get_target
from trainer.precision.policy import Policy
from trainer.workload import TrainTask

TINY = [
    "model=gpt2_nano",
    "model.n_layer=1",
    "model.d_model=64",
    "model.n_head=1",
    "model.context=64",
]
H200, A100 = (
    Gpu(t.device, t.capability) for t in (get_target("h200"), get_target("a100"))
)
KEYS = {
    "peak_bytes_per_device",
    "state_bytes",
    "fits",
    "gemms",
    "fp8_flop_share",
    "flops_per_token",
    "kernels",
    "collectives",
    "roofline_seconds",
    "max_micro_batch",
    "max_micro_batch_bound",
    "predicted",
}


@pytest.fixture(scope="session")  # compiled once, whatever a worker runs in between
def flagship():
    """Of two GPUs, two sequences each."""
    arguments = [
        *TINY,
        "precision=scalify_fp8_fp16",
        "gpus=2",
        "micro_batch=2",
        "search=no",
        "compare=no",
    ]
    return script.plan_of(arguments)


def test_the_plan_of_a_small_flagship(flagship):
    figures = json.loads(json.dumps(flagship.as_json()))
    assert set(figures) >= KEYS
    # A block of four linear layers: output, gradient of the input, gradient of the
    # weight.
    assert figures["gemms"]["fp8"] == 4 * 3
    assert figures["gemm_kernels"]["fp8 __cublas$lt$matmul$f8"] == 12
    assert figures["not_fp8"] == {}
    assert 0 < figures["fp8_flop_share"] < 1  # attention and head are not
    assert figures["attentions"] == {"fp16": 2}
    assert figures["fits"]
    assert figures["roofline_seconds"] > 0
    assert sum(figures["memory"].values()) == pytest.approx(
        figures["peak_bytes_per_device"], abs=len(figures["memory"])
    )
    assert abs(figures["memory"]["gaps"]) < 0.05 * figures["peak_bytes_per_device"]


def test_a_program_for_devices_that_are_not_there_is_not_written_to_the_cache(
    flagship,
    monkeypatch,
):
    """JAX could not read it, and says so each time the same is planned again. The first
    figures are shown before the comparison is compiled."""
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    during = []
    look = lambda *step: (
        during.append(jax.config.jax_persistent_cache_min_compile_time_secs)
        or flagship.measured.compiled
    )
    monkeypatch.setattr(plan, "lower_for_target", lambda step: None)
    monkeypatch.setattr(plan, "compile_for_target", look)
    small = [*TINY, "gpus=1", "micro_batch=2"]
    shown = []
    made = script.make_plan(
        *script.split_arguments(script.Arguments, [*small, "precision=scalify_fp8"]),
        lambda first: shown.append((len(during), first)),
    )
    assert during == [math.inf] * 2
    ((compiled_by_then, first),) = shown
    assert (compiled_by_then, first.bf16, made.bf16 is None) == (1, None, False)
    assert made.largest is None  # it is searched where search=yes
    assert script.lines_of(first) == script.lines_of(made)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == least < math.inf


def test_what_does_not_fit_names_keys_to_try_and_is_not_compared(
    flagship, monkeypatch, capsys
):
    monkeypatch.setattr(Hardware, "usable", 1000)
    monkeypatch.setattr(plan, "lower_for_target", lambda step: None)
    compiled = flagship.measured.compiled
    monkeypatch.setattr(plan, "compile_for_target", lambda *_: compiled)
    small = [*TINY, "precision=scalify_fp8", "micro_batch=2"]
    assert script.command(small) == 0
    out, err = capsys.readouterr()
    assert "DOES NOT FIT in" in out
    tried = (
        "\n  to try: micro_batch=1, model.remat=block, more gpus= with parallel=fsdp"
    )
    assert tried in out
    assert "bf16" not in out + err
    assert err.startswith(
        "planned with the vocabulary of data.tokenizer=byte: 256 ids;"
        " model.vocab_size=50257 plans GPT-2's\n"
    )


def test_keys_that_are_set_are_not_advised(flagship):
    assert "parallel=fsdp" in flagship.smaller
    spec = dataclasses.replace(flagship.spec, remat="block")
    sharded = flagship._replace(spec=spec, sequences=1, fsdp=2)
    more = "more gpus= with parallel=fsdp"
    assert sharded.smaller == ["model.scan_layers=true", more]


def test_the_comparison_says_whether_it_fits(flagship):
    compared = flagship._replace(bf16=flagship.measured)
    peak = f"{flagship.measured.peak / script.GIB:.2f} GiB a device; fits"
    assert f"memory in bf16: {peak}" in script.later_lines(compared)


def test_an_mfu_above_one_is_explained(flagship):
    explained = "(above 100%: FP8 matmuls have a higher peak)"
    assert explained not in script.lines_of(flagship)[-1]
    fast = flagship._replace(flops_per_token=10**9 * flagship.flops_per_token)
    assert explained in script.lines_of(fast)[-1]
    assert explained in script.predicted_lines(fast)[0]


def test_state_is_that_of_the_precision(flagship):
    # FP16 weights and two FP16 moments, and four bytes for each scale.
    w = flagship.measured.model

    sizes = [
        math.prod(s.shape)
        for s in jax.tree.leaves(
            jax.eval_shape(functional(w.spec).init, jax.random.key(0))
        )
    ]
    assert flagship.state_bytes == pytest.approx(
        3 * 2 * sum(sizes), abs=8 * 3 * len(sizes)
    )


def test_the_text_says_what_the_figures_say(flagship):
    text = "\n".join(script.lines_of(flagship))
    for part in (
        "12 fp8 __cublas$lt$matmul$f8",
        f"{flagship.parameters:,} parameters, 1 layers",
        "2 x NVIDIA H200",
        "all-reduce",
        "fits in",
        "MFU",
    ):
        assert part in text


def test_a_prediction_has_every_kernel_and_is_slower_than_the_roofline(flagship):
    figures = flagship.as_json()
    actual = figures["predicted"]
    kinds = actual["classes"]
    launches = {kind: row["launches"] for kind, row in kinds.items()}
    assert launches.pop(GAPS) == sum(launches.values()) == figures["kernels"]
    assert launches[FP8] == 12
    assert actual["seconds"] == pytest.approx(
        sum(row["seconds"] for row in kinds.values())
    )
    assert actual["seconds"] > figures["roofline_seconds"]
    assert actual["tokens_per_s"] * actual["seconds"] == pytest.approx(2 * 2 * 64)
    assert actual["times_as_fast_as_bf16"] is actual["classes_bf16"] is None
    text = "\n".join(script.predicted_lines(flagship))
    assert f"| FP8 products | {1e3 * kinds[FP8]['seconds']:.2f} | 12 |" in text
    beside = "\n".join(
        script.predicted_lines(flagship._replace(bf16=flagship.measured))
    )
    assert "1.000 times as fast as bf16" in beside
    cells = f"{1e3 * kinds[FP8]['seconds']:.2f} | 12"
    assert f"| FP8 products | {cells} | {cells} |" in beside


def test_layers_that_should_be_fp8_and_are_not_are_named(flagship):
    """The same program, judged as if a layer had been left out, or as if the tokens
    were others."""
    c = compose_config([*TINY, "precision=scalify_fp8_fp16"])
    model = build_model(c.model, c.precision.policy, 256)
    program = flagship.measured.compiled.program
    assert not_fp8(model, program, 128, H200) == []
    layer, *_ = not_fp8(
        build_model(c.model, model.policy, 256, rows=120), program, 120, H200
    )
    assert (layer.is_chosen, "not a multiple of 16" in layer.reason) == (True, True)
    assert "no FP8 tensor cores" in not_fp8(model, program, 128, A100)[0].reason
    excluded = compose_config(
        [*TINY, "precision=scalify_fp8_fp16", "precision.exclude=[h.0.*]"]
    )
    actual = not_fp8(
        build_model(excluded.model, excluded.precision.policy, 256), program, 128, H200
    )
    assert [layer.path for layer in actual] == [
        f"h.0.{n}" for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert not any(layer.is_chosen for layer in actual)
    assert actual[0].reason == "in precision.exclude"


# two programs for a GPU; of one precision: test_the_plan_of_a_small_flagship
@pytest.mark.slow
def test_a_layer_in_16_bits_beside_fp8_ones_has_nothing_transposed():
    """FP8 operands are, of each of four linear layers three; of the kept block's
    gradients XLA took the order."""
    excluded = [
        "model.n_layer=2",
        "precision.exclude=[h.0.*]",
        "gpus=1",
        "micro_batch=2",
        "search=no",
        "compare=no",
        "exact=yes",
    ]
    program = script.plan_of(
        [*TINY, "precision=scalify_fp8_fp16", *excluded]
    ).measured.compiled.program
    assert (
        sum(kernel.times for kernel in program.kernels if kernel.kind == "transpose")
        == 4 * 3
    )


def test_the_start_of_a_run_reads_the_step_that_it_compiled(flagship, monkeypatch):
    """A run on GPUs, but for its devices and its step, which are those of the plan."""
    # read by the plan already
    monkeypatch.setattr("trainer.assembly.build.Program", lambda text: text)
    overrides = [*TINY, "precision=scalify_fp8_fp16", "train.batch_tokens=256"]
    mesh = make_target_mesh(get_target("h200"), 2, 1)
    w = TrainTask(flagship.measured.model, "adamw", None, mesh)
    step = SimpleNamespace(as_text=lambda: flagship.measured.compiled.program)
    actual = check_fp8(compose_config(overrides), w, step)
    assert actual.share == flagship.fp8_flop_share
    assert actual.lines == [
        (
            f"compiled step: 12 FP8 products, {actual.share:.1%} of the FLOPs of matrix"
            " products and attentions"
        ),
        (
            "FP8 is not expected to be faster than bf16 at model.d_model=64: it pays"
            " from 768 on (an estimate for an H100, docs/results.md)"
        ),
    ]
    c = compose_config([*overrides, "model.n_layer=2"])
    with pytest.raises(
        UserError,
        match=(
            r"h\.\d\.attn\.c_attn is not FP8: .*; 12 of 24 FP8 products are FP8 \(and"
        ),
    ):
        check_fp8(c, w._replace(model=build_model(c.model, w.model.policy, 256)), step)
    assert check_fp8(compose_config([*TINY, "precision=bf16"]), w, step) is None
    w = w._replace(mesh=SimpleNamespace(devices=np.array(jax.devices("cpu"))))
    assert check_fp8(compose_config(overrides), w, None) is None  # not looked at


def test_fp8_is_not_required_of_what_has_none():
    fp8, mxfp8 = (
        compose_config([f"precision={name}"]).precision.policy
        for name in ("fp8_current", "mxfp8")
    )
    h100 = make_target_mesh(get_target("h100"), 1, 1).devices.flat[0]
    check_device(h100, fp8)
    with pytest.raises(UserError, match="H100 80GB HBM3 has no MXFP8 tensor cores"):
        check_device(h100, mxfp8)
    for device in (
        jax.devices("cpu")[0],
        make_target_mesh(get_target("a100"), 1, 1).devices.flat[0],
    ):
        with pytest.raises(
            UserError, match=rf"require_fp8=true, but {device.device_kind} has no FP8"
        ):
            check_device(device, fp8)
    with pytest.raises(UserError, match="precision=bf16 has no FP8 matmuls"):
        compose_config(["precision=bf16", "precision.require_fp8=true"])


def test_a_missing_product_is_told_by_its_size():
    c = compose_config([*TINY, "precision=scalify_fp8_fp16", "model.n_layer=1"])
    model = build_model(c.model, c.precision.policy, 256)
    sizes = [
        size
        for path in model.narrow
        for size in layer_products(linear_sizes(model.spec)[path], 128)
    ]
    gemms = [
        Gemm("k", "fp8", ("f8e4m3fn", "f8e4m3fn"), (1, *size), "", "g", 1)
        for size in sizes
    ]
    # 192 contracted elements, in eight padded parts
    gemms[1] = gemms[1]._replace(sizes=(8, 128, 64, 32))
    program = SimpleNamespace(gemms=gemms, attentions=[])
    assert not_fp8(model, program, 128, None) == []
    # as many, one of them another
    program.gemms = [*gemms[:1], *gemms[2:], gemms[0]._replace(sizes=(1, 16, 16, 16))]
    assert not_fp8(model, program, 128, None) == []
    program.gemms = [gemms[0]._replace(dtype="fp16", kernel="triton"), *gemms[1:]]
    assert [
        (layer.path, layer.reason) for layer in not_fp8(model, program, 128, None)
    ] == [
        (
            "h.0.attn.c_attn",
            (
                "its output (128 x 192 over 64) is compiled as fp16 (triton); 11 of 12"
                " FP8 products are FP8"
            ),
        )
    ]
    with pytest.raises(
        UserError,
        match=(
            r"for NVIDIA H200, h\.0\.attn\.c_attn is not FP8: its output \(128 x 192"
            r" over"
        ),
    ):
        check_step(model, program, 128, H200, require=None)
    assert (
        "not FP8: h.0.attn.c_attn"
        in check_step(model, program, 128, H200, require=False).lines[1]
    )
    ada = Gpu("NVIDIA L4", (8, 9))  # has FP8, but is not asked for it
    _, missing, slow = check_step(model, program, 128, ada, require=None).lines
    assert "not FP8: h.0.attn.c_attn" in missing
    assert (
        "not expected to be faster than bf16 at model.d_model=64: it pays from 768 on"
        in slow
    )
    with pytest.raises(UserError, match="for NVIDIA L4"):
        check_step(model, program, 128, ada, require=True)
    recomputed = [gemm for gemm in gemms[2:] if gemm.sizes != (1, 64, 192, 128)] * 2
    program.gemms = [gemms[0], gemms[1], *recomputed]
    assert [layer.path for layer in not_fp8(model, program, 128, None)] == [
        "h.0.attn.c_attn"
    ]


def test_a_plan_names_a_few_layers_for_each_reason_that_they_are_not_fp8():
    layers = [Layer(f"h.{i}.mlp.c_fc", "all are in bf16", True) for i in range(9)] + [
        Layer("head", "kept", True)
    ]
    assert script.not_fp8_lines(layers, max_layers=2) == [
        "  not FP8: h.0.mlp.c_fc, h.1.mlp.c_fc and 7 more: all are in bf16",
        "  not FP8: head: kept",
    ]


def test_figures_are_continued_along_a_line():
    near, far = {("a",): 10.0, ("b",): 1.0}, {("a",): 14.0, ("b",): 1.0, ("c",): 2.0}
    assert extrapolate(near, far, (2, 4), 48) == {("a",): 102, ("b",): 1, ("c",): 46}


def test_which_steps_are_continued():
    policy = lambda *arguments: (
        compose_config(["precision=scalify_fp8_fp16", *arguments]).precision.policy
    )
    spec = GPT2Spec(256, n_layer=48)
    assert is_extrapolated(spec, policy(), exact=False)
    assert not is_extrapolated(spec, policy(), exact=True)
    assert not is_extrapolated(
        GPT2Spec(256, n_layer=48, scan_layers=True), policy(), exact=False
    )
    assert not is_extrapolated(GPT2Spec(256, n_layer=12), policy(), exact=False)
    assert not is_extrapolated(spec, policy("precision.exclude=[h.47.*]"), exact=False)
    assert isinstance(policy(), Policy)


def test_seconds_of_products_and_collectives():
    h200, a100 = get_target("h200"), get_target("a100")
    assert gemm_seconds(1978.9e12, "fp8", h200) == pytest.approx(1)
    assert gemm_seconds(989.4e12, "bf16", h200) == pytest.approx(1)
    # FP8 has no rate there
    assert gemm_seconds(312e12, "fp8", a100) == pytest.approx(1)
    reduce = Collective("all-reduce", "f32", 450_000_000, 0, "x", times=2)
    assert collective_seconds(reduce, Hardware(h200, 8, 1, 0.75)) == pytest.approx(
        2 * 2 * 7 / 8 * 1e-3
    )
    gather = Collective("all-gather", "f32", 400_000_000, 16, "x", times=1)
    assert collective_seconds(gather, Hardware(h200, 16, 2, 0.75)) == pytest.approx(
        15 / 16 * 1e-3
    )


@pytest.mark.parametrize("name", TARGETS)
def test_peak_rates_of_every_target_are_known(name):
    target = get_target(name)
    assert peak_flops(target.device, jnp.bfloat16) is not None
    fp8 = compose_config(["precision=fp8_current"]).precision.policy
    lacks_fp8 = bool(Gpu(target.device, target.capability).lacks(fp8))
    assert (peak_flops(target.device, jnp.float8_e4m3fn) is None) == lacks_fp8


ASSIGNMENT = """BufferAssignment:
allocation 6: size 64, page 0, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <1 state.1 @0> (size=64,offset=0): f32[16]{0}
allocation 7: size 20, page 0, preallocated-temp:
 value: <2 add.1 @0> (size=8,offset=0): f32[2]{0}
 value: <3 add.2{0} @0> (size=4,offset=8): f8e4m3fn[2,2]{1,0}
 value: <4 in_place.1 @0> (size=4,offset=8): f8e4m3fn[4]{0}
 value: <5 pair.1{} @0> (size=16,offset=16): (f32[2]{0}, f8e4m3fn[4]{0})
 value: <7 while.1{2} (phi) @0> (size=32,offset=32): f32[8]{0}
allocation 8: size 4, page 0, thread-local:
 value: <6 inner.1 @0> (size=4,offset=0): f32[1]{0}
"""


@pytest.mark.parametrize(
    ("ranges", "held"),
    [
        (["state.1{}:0-9", "add.1{}:1-3", "add.2{0}:2-3"], ["add.1", "add.2{0}"]),
        (["add.1{}:1-2", "add.2{0}:3-4"], ["add.1"]),  # one after the other
        # one is made of the other
        (["add.1{}:1-3", "add.2{0}:3-4"], ["add.1", "add.2{0}"]),
        (["add.1{}:1-9", "while.1{2}:3-4"], ["while.1{2}", "add.1"]),
        # both in one place
        (["add.1{}:1-9", "add.2{0}:2-4", "in_place.1{}:4-6"], ["add.1", "add.2{0}"]),
        (["add.1{}:1-3", "pair.1{}:5-6", "inner.1{}:2-4"], ["pair.1{}"]),
    ],
)
def test_what_is_held_at_the_peak(ranges, held):
    actual = live_at_peak(
        ASSIGNMENT,
        "\n".join(["  BufferLiveRange:", *(f"    {line}" for line in ranges)]),
    )
    assert [buffer.name for buffer in actual] == held
    shapes = {
        "add.1": ("f32", (2,)),
        "add.2{0}": ("f8e4m3fn", (2, 2)),
        "pair.1{}": ("", ()),
        "while.1{2}": ("f32", (8,)),
    }
    assert [buffer.shape for buffer in actual] == [shapes[name] for name in held]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["target=h300"], "target=h300 is not known; did you mean 'h200'"),
        (["gpus=0"], "gpus=0"),
        (["gpus=12", "hosts=5"], "a multiple of the hosts"),
        (["gpus=4097"], "1 to 4096"),
        (["model=gpt2_1b"], "gpt2_1b"),
        (["model.depth=3"], "depth"),
        (["search=maybe"], "search=maybe: expected yes or no"),
        (["memory_fraction=2"], "memory_fraction"),
        (["train.batch_tokens=3072", "model=gpt2_124m", "gpus=2"], "3 sequences"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_arguments_are_answered_in_one_line(arguments, message, capsys):
    assert script.command(arguments) == 2
    out = capsys.readouterr()
    assert message in out.err
    assert out.err.count("\n") == 1
    assert out.out == ""


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [([], 4096), (["train.batch_tokens=8192", "train.grad_accum_steps=2"], 8192)],
)
def test_a_context_longer_than_the_default_batch_needs_no_batch_on_the_command_line(
    arguments, tokens
):
    assert (
        script.planned_config(["model=llama2_7b", *arguments]).train.batch_tokens
        == tokens
    )


def test_a_missing_package_is_named(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "nvidia-nvvm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(
        UserError, match=r"needs nvidia-nvvm, .*pip install '.\[plan\]'"
    ):
        aot.check_packages()


def test_a_plugin_of_another_version_is_named(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(UserError, match=r"jax-cuda13-plugin 0\.9\.0 does not fit jax"):
        aot.check_packages()
