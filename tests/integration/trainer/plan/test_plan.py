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
from precisions import ADAMW

from trainer.assembly import planning
from trainer.assembly.build import build_model, check_fp8
from trainer.cli import plan as script
from trainer.cli.commands import run
from trainer.compiled.fp8 import (
    Gpu,
    check_device,
    check_step,
    layer_products,
    not_fp8,
)
from trainer.compiled.operations import Collective, FusedAttention, Gemm
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.models.flops import linear_sizes
from trainer.models.gpt2.model import build_functions
from trainer.models.gpt2.spec import GPT2Spec
from trainer.observe.peaks import peak_flops
from trainer.plan import aot, plan
from trainer.plan.aot import make_target_mesh
from trainer.plan.figures import (
    Hardware,
    attention_seconds,
    collective_seconds,
    extrapolate,
    gemm_seconds,
)
from trainer.plan.plan import is_extrapolated
from trainer.plan.targets import TARGETS, get_target
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
    # A block of four linear layers: output, gradient of the input, gradient of the
    # weight.
    assert figures["gemms"]["fp8"] == 4 * 3
    assert figures["gemm_kernels"]["fp8 __cublas$lt$matmul$f8"] == 12
    assert figures["not_fp8"] == {}
    assert 0 < figures["fp8_flop_share"] < 1  # attention and head are not
    assert figures["attentions"] == {"fp16": 2}
    assert figures["fits"]
    memory = figures["memory"]
    peak = figures["peak_bytes_per_device"]
    assert sum(memory.values()) == pytest.approx(peak, abs=len(memory))
    assert abs(memory["gaps"]) < 0.05 * peak
    # FP16 weights and two FP16 moments, and four bytes for each scale.
    shapes = build_functions(flagship.measured.model.spec).shapes
    params = jax.tree.leaves(shapes)
    state_bytes = 3 * 2 * sum(p.size for p in params)
    scales = 8 * 3 * len(params)
    assert flagship.state_bytes == pytest.approx(state_bytes, abs=scales)
    text = "\n".join(script.step_lines(flagship))
    for part in (
        "12 fp8 __cublas$lt$matmul$f8",
        f"{flagship.task.parameters:,} parameters, 1 layer of",
        "2 x NVIDIA H200",
        "all-reduce",
        "fits in",
        "MFU",
    ):
        assert part in text


def test_what_does_not_fit_names_keys_to_try_and_is_not_compared(
    flagship, monkeypatch, capsys
):
    monkeypatch.setattr(Hardware, "usable", 1000)
    monkeypatch.setattr(plan, "lower_for_target", lambda step: None)
    compiled = flagship.measured.compiled
    monkeypatch.setattr(plan, "compile_for_target", lambda *_: compiled)
    small = [*TINY, "precision=scalify_fp8", "micro_batch=2"]
    assert run("plan", small) == 0
    out, err = capsys.readouterr()
    assert "DOES NOT FIT in" in out
    tried = "micro_batch=1, model.remat=block, more gpus= with parallel=fsdp"
    assert f"\n  to try: {tried}" in out
    assert "bf16" not in out + err
    assert "the vocabulary of data.tokenizer=byte: 256 ids" in err


def test_the_search_compiles_the_batch_of_each_size(flagship, monkeypatch):
    """Every sequence of a device takes ten bytes of a thousand."""

    def measure(task, batch, hardware, sequences, **_):
        assert batch.tokens_AxBxT1.shape[1] == sequences * hardware.gpus
        kinds = ("optimizer", "FP8 weights", "gradients")
        memory = {("memory", kind): 0 for kind in kinds}
        memory["memory", "weights"] = 10 * sequences
        return flagship.measured._replace(figures=memory)

    monkeypatch.setattr(Hardware, "usable", 1000)
    monkeypatch.setattr(plan, "measure", measure)
    arguments = [*TINY, "precision=scalify_fp8_fp16", "gpus=2", "compare=no"]
    actual = script.plan_of([*arguments, "micro_batch=2", "search=yes"])
    assert actual.largest == (100, 100)


def test_layers_that_should_be_fp8_and_are_not_are_named(flagship):
    """The same program, judged as if a layer had been left out, or as if the tokens
    were others."""

    def planned(*overrides, rows=None):
        c = compose_config([*TINY, "precision=scalify_fp8_fp16", *overrides])
        return build_model(c.model, c.precision.policy, 256, matmul_rows=rows)

    program = flagship.measured.compiled.program
    model = planned()
    assert not_fp8(model, program, 128, H200) == []
    layer, *_ = not_fp8(planned(rows=120), program, 120, H200)
    assert layer.is_chosen
    assert "not a multiple of 16" in layer.reason
    assert "no FP8 tensor cores" in not_fp8(model, program, 128, A100)[0].reason
    excluded = not_fp8(planned("precision.exclude=[h.0.*]"), program, 128, H200)
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert [layer.path for layer in excluded] == [f"h.0.{name}" for name in names]
    assert not any(layer.is_chosen for layer in excluded)
    assert excluded[0].reason == "in precision.exclude"


def test_the_start_of_a_run_reads_the_step_that_it_compiled(flagship, monkeypatch):
    """A run on GPUs, but for its devices and its step, which are those of the plan."""
    # read by the plan already
    monkeypatch.setattr("trainer.assembly.build.Program", lambda text: text)
    overrides = [*TINY, "precision=scalify_fp8_fp16", "train.batch_tokens=256"]
    mesh = make_target_mesh(get_target("h200"), 2, 1)
    w = TrainTask(flagship.measured.model, ADAMW, mesh)
    step = SimpleNamespace(as_text=lambda: flagship.measured.compiled.program)
    actual = check_fp8(compose_config(overrides), w, step)
    assert actual.share == flagship.fp8_flop_share
    assert "compiled step: 12 FP8 products" in actual.lines[0]
    pays = "not expected to be faster than bf16 at model.d_model=64: it pays from 768"
    assert pays in actual.lines[1]
    c = compose_config([*overrides, "model.n_layer=2"])
    deeper = w._replace(model=build_model(c.model, w.model.policy, 256))
    message = r"h\.\d\.attn\.c_attn is not FP8: .*; 12 of 24 FP8 products are FP8 \(and"
    with pytest.raises(UserError, match=message):
        check_fp8(c, deeper, step)
    assert check_fp8(compose_config([*TINY, "precision=bf16"]), w, step) is None
    w = w._replace(mesh=SimpleNamespace(devices=np.array(jax.devices("cpu"))))
    assert check_fp8(compose_config(overrides), w, None) is None  # not looked at


def test_fp8_is_not_required_of_what_has_none():
    fp8, mxfp8 = (
        compose_config([f"precision={name}"]).precision.policy
        for name in ("fp8_current", "mxfp8")
    )
    h100, a100 = (
        make_target_mesh(get_target(name), 1, 1).devices.flat[0]
        for name in ("h100", "a100")
    )
    check_device(h100, fp8)
    with pytest.raises(UserError, match="H100 80GB HBM3 has no MXFP8 tensor cores"):
        check_device(h100, mxfp8)
    for device in (jax.devices("cpu")[0], a100):
        message = rf"require_fp8=true, but {device.device_kind} has no FP8"
        with pytest.raises(UserError, match=message):
            check_device(device, fp8)
    with pytest.raises(UserError, match="precision=bf16 has no FP8 matmuls"):
        compose_config(["precision=bf16", "precision.require_fp8=true"])


def test_a_missing_product_is_told_by_its_size():
    c = compose_config([*TINY, "precision=scalify_fp8_fp16"])
    model = build_model(c.model, c.precision.policy, 256)
    operands = ("f8e4m3fn", "f8e4m3fn")
    gemms = [
        Gemm("k", "fp8", operands, (1, *size), "", "g", 1, accumulates=False)
        for path in model.narrow
        for size in layer_products(linear_sizes(model.spec)[path], 128)
    ]
    # 192 contracted elements, in eight padded parts
    gemms[1] = gemms[1]._replace(sizes=(8, 128, 64, 32))
    program = SimpleNamespace(gemms=gemms, attentions=[])
    assert not_fp8(model, program, 128, None) == []
    # as many, one of them another
    program.gemms = [*gemms[:1], *gemms[2:], gemms[0]._replace(sizes=(1, 16, 16, 16))]
    assert not_fp8(model, program, 128, None) == []
    program.gemms = [gemms[0]._replace(dtype="fp16", kernel="triton"), *gemms[1:]]
    (layer,) = not_fp8(model, program, 128, None)
    assert layer.path == "h.0.attn.c_attn"
    reason = "its output (128 x 192 over 64) is compiled as fp16 (triton); 11 of 12"
    assert layer.reason.startswith(reason)
    with pytest.raises(UserError, match=r"for NVIDIA H200, h\.0\.attn\.c_attn is not"):
        check_step(model, program, 128, H200, require=None)
    lines = check_step(model, program, 128, H200, require=False).lines
    assert "not FP8: h.0.attn.c_attn" in lines[1]
    recomputed = [gemm for gemm in gemms[2:] if gemm.sizes != (1, 64, 192, 128)] * 2
    program.gemms = [*gemms[:2], *recomputed]
    (layer,) = not_fp8(model, program, 128, None)
    assert layer.path == "h.0.attn.c_attn"
    # over two devices, heads and hidden channels are halves; one product is repeated
    halves = {"attn.c_attn": (64, 96), "mlp.c_fc": (64, 128)}
    halves |= {"attn.c_proj": (32, 64), "mlp.c_proj": (128, 64)}
    split = [
        gemms[0]._replace(sizes=(1, *size))
        for path in model.narrow
        for size in layer_products(halves[path.removeprefix("h.0.")], 128)
    ]
    program.gemms = [*split, split[0]]
    assert not_fp8(model, program, 128, None, tensor=2) == []
    assert not_fp8(model, program, 128, None)


def test_figures_are_continued_along_a_line():
    near, far = {("a",): 10.0, ("b",): 1.0}, {("a",): 14.0, ("b",): 1.0, ("c",): 2.0}
    assert extrapolate(near, far, (2, 4), 48) == {("a",): 102, ("b",): 1, ("c",): 46}


def test_deep_steps_whose_layers_are_alike_are_continued():
    spec = GPT2Spec(256, n_layer=48)
    alike, unlike = (
        compose_config(["precision=scalify_fp8_fp16", *more]).precision.policy
        for more in ([], ["precision.exclude=[h.47.*]"])
    )
    assert is_extrapolated(spec, alike, exact=False)
    assert not is_extrapolated(spec, alike, exact=True)
    assert not is_extrapolated(spec, unlike, exact=False)
    for changes in ({"scan_layers": True}, {"n_layer": 12}):
        changed = dataclasses.replace(spec, **changes)
        assert not is_extrapolated(changed, alike, exact=False)


def test_a_causal_attention_takes_half():
    sizes, h200 = (2, 4, 1024, 1024, 64), get_target("h200")
    bidirectional, causal = (
        attention_seconds(FusedAttention("bf16", False, is_causal, sizes, "a", 3), h200)
        for is_causal in (False, True)
    )
    assert (
        causal
        == bidirectional / 2
        == pytest.approx(2 * 2 * math.prod(sizes) / 989.4e12 / 2)
    )


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["target=h300"], "target=h300 is not known; did you mean 'h200'"),
        (["gpus=12", "hosts=5"], "a multiple of the hosts"),
        (["gpus=4097"], "1 to 4096"),
        (["memory_fraction=2"], "memory_fraction"),
        (["micro_batch=-3"], "micro_batch=-3: expected 0 or more"),
        (["train.batch_tokens=3072", "model=gpt2_124m", "gpus=2"], "3 sequences"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_arguments_are_answered_in_one_line(arguments, message, capsys):
    assert run("plan", arguments) == 2
    out = capsys.readouterr()
    assert message in out.err
    assert out.err.count("\n") == 1
    assert out.out == ""


def test_micro_batches_of_a_file_keep_the_default_batch(tmp_path, monkeypatch):
    file = tmp_path / "my.yaml"
    file.write_text("train: {grad_accum_steps: 4}\n")
    monkeypatch.setattr(planning, "build_plan", lambda config, *_, **__: config)
    assert script.plan_of([f"config={file}"]).train.grad_accum_steps == 4


@pytest.mark.parametrize("tensor", [4, -1])
def test_gpus_of_a_tensor_group_share_their_sequences(tensor):
    keys = ["train.batch_tokens=2048", "model.context=128"]
    arguments = script.Arguments(gpus=8)
    _, sequences = script.planned_config(
        arguments, [*keys, f"parallel.tensor={tensor}", "parallel.data=2"]
    )
    assert sequences == 8


def test_a_tensor_group_of_more_gpus_than_there_are_is_refused():
    keys = ["train.batch_tokens=2048", "model.context=128", "parallel.data=1"]
    with pytest.raises(
        UserError, match=r"parallel.tensor=16 does not fit: there are 8"
    ):
        script.plan_of(["gpus=8", "parallel.tensor=16", "target=h100", *keys])


def test_a_missing_package_and_a_plugin_of_another_version_are_named(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "nvidia-nvvm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    missing = r"needs nvidia-nvvm, .*pip install '.\[plan\]'"
    with pytest.raises(UserError, match=missing):
        aot.check_packages()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(UserError, match=r"jax-cuda13-plugin 0\.9\.0 does not fit jax"):
        aot.check_packages()
