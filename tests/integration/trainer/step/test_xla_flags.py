"""What the compiler is told for the same bits: by the key, by the cache, and of every
program beside the step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import slow
from precisions import policy, workload

from trainer.compiled.hlo import Program
from trainer.config.composition import compose_config
from trainer.models.gpt2.spec import GPT2Spec
from trainer.observe.numerics import make_numerics, stored_gradients
from trainer.parallel.mesh import abstract_batch, make_mesh
from trainer.plan.aot import (
    OPTIONS,
    lower_for_target,
    make_target_mesh,
    no_compilation_cache,
)
from trainer.plan.targets import get_target
from trainer.step.nonfinite import first_nonfinite_operation
from trainer.step.xla_flags import KernelChoice, gpu_options
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
    for given in ("auto", "true", "false", "null"):
        expected = None if given == "null" else given
        assert compose_config([f"deterministic={given}"]).deterministic == expected


def test_auto_measures_only_where_what_it_found_is_cached():
    for key, expected in (
        ("auto", (KernelChoice.FIXED, KernelChoice.CACHED)),
        (None, (KernelChoice.FIXED, KernelChoice.CACHED)),
        ("true", (KernelChoice.FIXED, KernelChoice.FIXED)),
        ("false", (KernelChoice.FASTEST, KernelChoice.FASTEST)),
    ):
        chosen = tuple(KernelChoice.chosen(key, cached=cached) for cached in (0, 1))
        assert chosen == expected


def test_what_promises_bits_excludes_kernels_without_an_order():
    exclude = "xla_gpu_exclude_nondeterministic_ops"
    assert exclude not in gpu_options(FP8, KernelChoice.FASTEST)
    for kernels in (KernelChoice.CACHED, KernelChoice.FIXED):
        options = gpu_options(FP8, kernels)
        assert options[exclude]
        assert not options["xla_gpu_enable_triton_gemm"]
        fixed = options.get("xla_gpu_deterministic_ops", False)
        assert fixed == (kernels is KernelChoice.FIXED)
        assert options["xla_allow_excess_precision"] is False


def small(mesh, kernels=KernelChoice.CACHED):
    w = workload("scalify_fp8_fp16", spec=GPT2Spec(512, 128, 1, 1, 128))
    return w._replace(mesh=mesh, kernels=kernels)


@pytest.fixture
def compiled_with(monkeypatch):
    """The options that are given to each jitted function, by its name, were this a
    GPU's task."""
    options: dict[str, list] = {}
    jit = jax.jit

    def recording(fun, **settings):
        name = getattr(fun, "func", fun).__name__
        options.setdefault(name, []).append(settings.get("compiler_options"))
        return jit(fun, **settings)

    monkeypatch.setattr(jax, "jit", recording)
    monkeypatch.setattr(TrainTask, "compiler_options", property(lambda task: HARMLESS))
    return options


def test_validation_and_numerics_are_compiled_with_the_options_of_the_step(
    compiled_with,
):
    w = small(make_mesh(1))
    jitted_eval_step(w)
    make_numerics(w)
    for name in ("eval_step", "stored_gradients", "stored_figures"):
        assert compiled_with[name] == [HARMLESS], name


def test_operations_with_options_find_the_same_and_are_compiled_once(compiled_with):
    def fn(x):
        return sum(jnp.log(jnp.sin(x) * k) for k in (1.0, 2.0, 3.0))

    x = jnp.linspace(-1, 1, 8)
    actual = first_nonfinite_operation(fn, x, compiler_options=HARMLESS)
    assert str(actual) == str(first_nonfinite_operation(fn, x))
    compiled_with.clear()
    assert (
        first_nonfinite_operation(fn, jnp.abs(x) + 0.1, compiler_options=HARMLESS)
        is None
    )
    assert len(compiled_with["bind"]) <= 4  # sin, mul, log, add: thrice each


def test_a_validation_for_a_gpu_has_the_products_that_its_step_has():
    """Without a GPU: whether Triton may make products is seen in what is compiled."""
    w = small(make_target_mesh(get_target("h100"), 1, 1))
    batch = abstract_batch(1, 2, 128, document_mask=False, mesh=w.mesh)
    lowered = lower_for_target(
        lambda: jitted_eval_step(w).lower(abstract_state(w, 1.0), batch)
    )
    with no_compilation_cache():
        program = Program(lowered.compile(compiler_options=OPTIONS).as_text())
    fp8 = [gemm for gemm in program.gemms if gemm.dtype == "fp8"]
    assert len(fp8) == 4
    # FP8 products take their constants only where Triton makes none.
    assert [gemm.kernel for gemm in program.gemms if "triton" in gemm.kernel] == []
    # They take them, as in the step: a result in FP32 would be multiplied and rounded
    # by a kernel of its own.
    instructions = {e.instruction.name: e.instruction for e in program.executed}
    assert {instructions[gemm.name].shapes[0].dtype for gemm in fp8} == {"f16"}


@pytest.mark.parametrize("kernels", [KernelChoice.CACHED, slow(KernelChoice.FASTEST)])
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
        assert set(marked) == {kernels is not KernelChoice.FASTEST}
