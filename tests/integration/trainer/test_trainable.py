"""Training a part of a model: the rest has no gradient in the compiled step, no
moments, and keeps every bit."""

import math
import re

import jax
import numpy as np
import pytest
from precisions import SPEC, abstract, batch, copied, step_inputs, workload

from scalify_core import tree, weights
from trainer.compiled.hlo import Program
from trainer.errors import UserError
from trainer.models.flops import flops_per_token, linear_sizes
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.spec import LlamaSpec
from trainer.models.roles import select_roles
from trainer.run.compatibility import check_same_trainable
from trainer.workload import compile_step, first_state

SCANNED = GPT2Spec(
    vocab_size=64, context=16, n_layer=2, n_head=2, d_model=32, scan_layers=True
)
LLAMA = LlamaSpec(
    vocab_size=64, context=16, n_layer=1, n_head=2, n_kv_head=1, d_model=32
)
# elements of a layer's four kernels: c_attn 3, c_proj 1, c_fc 4, c_proj 4 times D D
KERNELS = 4 * 32 * 32 * 3


def only(*names, preset="fp32", spec=SPEC):
    return workload(preset, spec=spec)._replace(trainable=names)


def trained(w, steps, accum=1):
    state = first_state(w, seed=0)
    step = compile_step(w, abstract(w, accum), state)
    for n in range(steps):
        state, metrics = step(copied(state), batch(w, n, accum), step_inputs(n, 1e-2))
        assert metrics["finite"]
    return state


def by_name(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): leaf for path, leaf in leaves}


def test_names_stand_for_groups_and_patterns_in_the_order_of_the_model():
    roles = workload("fp32").model.roles
    stacked = workload("fp32", 1, SCANNED).model.roles

    def names(roles, *selected):
        return list(by_name(select_roles(roles, selected)))

    assert names(stacked, "h.*.ln_1.*") == ["h.ln_1.bias", "h.ln_1.scale"]
    assert names(roles, "embeddings") == ["wpe.embedding", "wte.embedding"]
    every = names(roles, "biases", "kernels", "gains", "embeddings")
    assert every == list(by_name(roles))
    assert all(name.startswith("h.0.mlp.") for name in names(roles, "h.0.mlp.*"))
    valid = "valid: embeddings, kernels, gains, biases, and"
    for named, wrong in ((stacked, "h.0.ln_1.*"), (roles, "h.7.*")):
        message = f"{re.escape(repr(wrong))} matches no parameter; {valid}"
        with pytest.raises(UserError, match=message):
            select_roles(named, ["gains", wrong])


@pytest.mark.parametrize(
    ("preset", "accum"),
    [
        ("fp32", 1),
        ("scalify_fp8_fp16", 2),
        ("fp8_delayed", 1),
    ],
)
def test_what_is_not_trained_keeps_every_bit_and_has_no_moments(preset, accum):
    w = only("embeddings", "h.0.mlp.c_fc.*", preset=preset)
    first, last = first_state(w, seed=0), trained(w, 2, accum)
    names = set(by_name(w.trained_roles))
    assert len(names) == 4
    a, b = (by_name(weights.wide(state.params)) for state in (first, last))
    same = {name for name in a if np.array_equal(a[name], b[name])}
    assert same == set(by_name(w.model.roles)) - names
    moments = sum(x.size for x in tree.leaves(last.opt_state) if x.ndim)
    assert moments == 2 * sum(
        x.size for x in tree.leaves(w.select_trained(last.params))
    )


def test_the_compiled_step_has_no_gradient_of_the_rest():
    names = ("embeddings", "gains", "biases")
    every, part = (products(only(*trained, spec=SCANNED)) for trained in ((), names))
    # a product of [inputs, tokens] and [tokens, outputs] for each kernel
    saved = 2 * 256 * KERNELS * SCANNED.n_layer
    assert every - part == saved
    w = only(*names, spec=SCANNED)
    assert (flops_per_token(SCANNED) - w.flops_per_token) * 256 == saved


def products(w):
    """FLOPs of all matrix products of the compiled step, loops counted as often as they
    turn."""
    program = Program(compile_step(w, abstract(w)).as_text())
    return sum(2 * math.prod(gemm.sizes) * gemm.times for gemm in program.gemms)


def test_a_state_with_other_moments_is_refused_with_what_to_do():
    w = only("embeddings")
    meta = {"trainable": None}  # all parameters
    message = r"trained with 'train.trainable=\[\]', this is .*\[embeddings\]': "
    with pytest.raises(UserError, match=message):
        check_same_trainable("A", meta, w)
    check_same_trainable("A", meta, only())
    # the same by other words
    check_same_trainable("A", {"trainable": ["w?e.*"]}, w)


@pytest.mark.parametrize("spec", [SPEC, SCANNED, LLAMA])
def test_a_layer_is_frozen_where_its_kernel_is(spec):
    every = set(linear_sizes(spec))
    outside = {path for path in every if ".mlp." not in path}
    for name, frozen in (("kernels", set()), ("gains", every), ("h.*.mlp.*", outside)):
        w = only(name, spec=spec)
        assert w.frozen_layers == frozen
        assert 0 < w.flops_per_token <= flops_per_token(spec)
        assert (w.flops_per_token == flops_per_token(spec)) is (not frozen)
