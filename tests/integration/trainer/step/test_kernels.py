"""What the compiler is told for the same bits: by the key, by the cache, and of every
program beside the step."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import CACHE, TINY
from families import slow
from precisions import policy, workload

from trainer import compose, train
from trainer.compiled.hlo import Program
from trainer.config import schema
from trainer.config.composition import compose_config
from trainer.config.fields import from_saved, to_tree
from trainer.errors import UserError
from trainer.models.gpt2.spec import GPT2Spec
from trainer.observe import nan_diagnosis
from trainer.observe.nan_diagnosis import make_diagnose
from trainer.observe.numerics import stored_gradients
from trainer.parallel.mesh import abstract_batch, make_mesh
from trainer.plan.aot import (
    OPTIONS,
    lower_for_target,
    make_target_mesh,
    no_compilation_cache,
)
from trainer.plan.targets import get_target
from trainer.step.kernels import Kernels, determinism_message, gpu_options
from trainer.step.nonfinite import first_nonfinite_operation
from trainer.workload import (
    Model,
    TrainTask,
    abstract_state,
    jitted_eval_step,
    lower_step,
)

FP8 = policy("scalify_fp8_fp16")
# an option that every compiler takes, and that changes nothing
HARMLESS = {"xla_embed_ir_in_executable": True}


def test_the_key_is_a_word_or_what_yaml_makes_of_it():
    for given, meant in (
        ("auto", "auto"),
        ("true", "true"),
        ("false", "false"),
        ("null", None),
    ):
        assert compose_config([f"deterministic={given}"]).deterministic == meant
    with pytest.raises(
        UserError, match=r"deterministic='maybe' is not a choice.*auto, false, true"
    ):
        compose_config(["deterministic=maybe"])


def test_a_run_from_before_the_key_goes_on():
    tree = to_tree(compose_config([]))
    del tree["deterministic"]
    assert from_saved(schema.Config, tree).deterministic is None


def test_auto_measures_only_where_what_it_found_is_kept():
    meaning = {
        (asked, cached): Kernels.chosen(asked, cached=cached)
        for asked in ("auto", None)
        for cached in (0, 1)
    }
    assert meaning == {
        ("auto", 0): Kernels.FIXED,
        ("auto", 1): Kernels.CACHED,
        (None, 0): Kernels.FIXED,
        (None, 1): Kernels.CACHED,
    }
    assert {Kernels.chosen("true", cached=cached) for cached in (False, True)} == {
        Kernels.FIXED
    }
    assert {Kernels.chosen("false", cached=cached) for cached in (False, True)} == {
        Kernels.FASTEST
    }


def test_what_promises_bits_excludes_kernels_without_an_order():
    assert "xla_gpu_exclude_nondeterministic_ops" not in gpu_options(
        FP8, Kernels.FASTEST
    )
    for kernels in (Kernels.CACHED, Kernels.FIXED):
        options = gpu_options(FP8, kernels)
        assert options["xla_gpu_exclude_nondeterministic_ops"]
        assert not options["xla_gpu_enable_triton_gemm"]
        assert options.get("xla_gpu_deterministic_ops", False) == (
            kernels is Kernels.FIXED
        )
        assert options["xla_allow_excess_precision"] is False


def test_the_line_says_what_is_promised_and_why():
    assert determinism_message(Kernels.FASTEST, "cpu", None).startswith(
        "deterministic: yes"
    )
    assert determinism_message(Kernels.FASTEST, "gpu", "~/xla").startswith(
        "deterministic: no"
    )
    assert "compile_cache=~/xla" in determinism_message(Kernels.CACHED, "gpu", "~/xla")
    assert "compile_cache=null" in determinism_message(Kernels.FIXED, "gpu", None)
    assert "compile_cache" not in determinism_message(Kernels.FIXED, "gpu", "~/xla")


def small(mesh, kernels=Kernels.CACHED):
    w = workload("scalify_fp8_fp16", spec=GPT2Spec(512, 128, 1, 1, 128))
    return w._replace(mesh=mesh, kernels=kernels)


@pytest.fixture
def told(monkeypatch):
    """The options that are given to each compilation, by the function's name, were this
    a GPU's task."""
    options: dict[str, list] = {}
    jit, compile_ = jax.jit, jax.stages.Lowered.compile

    def recording(fun, **settings):
        options.setdefault(getattr(fun, "func", fun).__name__, []).append(
            settings.get("compiler_options")
        )
        return jit(fun, **settings)

    def compiling(lowered, compiler_options=None):
        options.setdefault("compiled", []).append(compiler_options)
        return compile_(lowered, compiler_options)

    monkeypatch.setattr(jax, "jit", recording)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    monkeypatch.setattr(TrainTask, "compiler_options", property(lambda task: HARMLESS))
    return options


@pytest.mark.slow  # a run; of a function: below
def test_validation_and_numerics_are_compiled_with_the_options_of_the_step(
    told, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    settings = [
        *TINY,
        "parallel.data=1",
        "sample.max_new_tokens=0",
        "tracker=jsonl",
        "train.steps=2",
        "run_dir=A",
        CACHE,
    ]
    assert train(compose([*settings, "metrics.numerics_every=1"])).step == 2
    for name in ("compiled", "eval_step", "stored_gradients", "tensor_figures"):
        assert told[name] == [HARMLESS] * len(told[name]), name


def test_a_diagnosis_compiles_its_operations_with_them(told, monkeypatch):
    w = small(make_mesh(1))
    tokens = abstract_batch(1, 2, 128, document_mask=False, mesh=w.mesh)
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tokens)
    monkeypatch.setattr(
        nan_diagnosis,
        "first_nonfinite_operation",
        lambda *args, compiler_options: compiler_options,
    )
    state = SimpleNamespace(key=jax.random.key(0), params={}, scaling=())
    assert make_diagnose(w)(state, batch, 0) == f"micro-batch 0: {HARMLESS}"


def test_operations_with_options_find_the_same_and_are_compiled_once(told):
    def fn(x):
        return sum(jnp.log(jnp.sin(x) * k) for k in (1.0, 2.0, 3.0))

    x = jnp.linspace(-1, 1, 8)
    actual = first_nonfinite_operation(fn, x, compiler_options=HARMLESS)
    assert str(actual) == str(first_nonfinite_operation(fn, x))
    told.clear()
    assert (
        first_nonfinite_operation(fn, jnp.abs(x) + 0.1, compiler_options=HARMLESS)
        is None
    )
    assert len(told["bind"]) <= 4  # sin, mul, log, add: thrice each


@pytest.mark.parametrize("kernels", [Kernels.CACHED, slow(Kernels.FASTEST)])
def test_a_validation_for_a_gpu_has_the_products_that_its_step_has(kernels):
    """Without a GPU: whether Triton may make products is seen in what is compiled."""
    w = small(make_target_mesh(get_target("h100"), 1, 1), kernels)
    batch = abstract_batch(1, 2, 128, document_mask=False, mesh=w.mesh)
    lowered = lower_for_target(
        lambda: jitted_eval_step(w).lower(abstract_state(w, 1.0), batch)
    )
    with no_compilation_cache():
        program = Program(lowered.compile(compiler_options=OPTIONS).as_text())
    fp8 = [gemm for gemm in program.gemms if gemm.dtype == "fp8"]
    assert len(fp8) == 4
    # FP8 products take their constants only where Triton makes none, so none of the
    # three modes has any.
    assert [gemm.kernel for gemm in program.gemms if "triton" in gemm.kernel] == []
    # They take them, as in the step: a result in FP32 would be multiplied and rounded
    # by a kernel of its own.
    instructions = {e.instruction.name: e.instruction for e in program.executed}
    assert {instructions[gemm.name].shapes[0].dtype for gemm in fp8} == {"f16"}


@pytest.mark.parametrize("kernels", [slow(Kernels.CACHED), Kernels.FASTEST])
def test_every_backward_pass_of_attention_says_which_kernel_it_is(kernels):
    """XLA says so of the first of equal calls only, and then fails at the first step of
    a model of several layers: seen on an H100."""
    w = small(make_target_mesh(get_target("h100"), 1, 1), kernels)
    spec = dataclasses.replace(w.model.spec, n_layer=2)
    w = w._replace(model=Model.make(spec, w.model.policy))
    batch = abstract_batch(1, 2, 128, document_mask=False, mesh=w.mesh)
    gradients = w.jit(functools.partial(stored_gradients, w))
    for lower in (
        lambda: lower_step(w, batch),
        lambda: gradients.lower(abstract_state(w, 1.0), batch, np.int32(0)),
    ):
        text = lower_for_target(lower).as_text()
        calls = [line for line in text.splitlines() if "fmhaSoftmaxBackward" in line]
        marked = ["force_deterministic" in call for call in calls]
        assert marked
        assert set(marked) == {kernels is not Kernels.FASTEST}
