"""Training a part of a model: the rest has no gradient in the compiled step, no
moments, and keeps every bit."""

import math

import jax
import numpy as np
import pytest
from families import slow
from precisions import SPEC, abstract, batch, bits, copied, hyper, workload

from scalify_core import tree, weights
from trainer.compiled.hlo import Program
from trainer.errors import UserError
from trainer.models.flops import flops_per_token
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.spec import LlamaSpec
from trainer.models.registry import family_of
from trainer.models.roles import select_roles
from trainer.parallel.distribute import GradReduceConfig
from trainer.run.compatibility import check_same_trainable
from trainer.step.clip_and_decay import optimizer_from_roles
from trainer.step.state_tree import subtree_like, with_subtree
from trainer.workload import abstract_state, compile_step, first_state

SCANNED = GPT2Spec(
    vocab_size=64, context=16, n_layer=2, n_head=2, d_model=32, scan_layers=True
)
LLAMA = LlamaSpec(
    vocab_size=64, context=16, n_layer=1, n_head=2, n_kv_head=1, d_model=32
)
# elements of a layer's four kernels: c_attn 3, c_proj 1, c_fc 4, c_proj 4 times D D
KERNELS = 4 * 32 * 32 * 3


def only(*names, preset="fp32", devices=1, spec=SPEC):
    return workload(preset, devices, spec)._replace(trainable=names)


def trained(w, steps, accum=1):
    state = first_state(w, seed=0)
    step = compile_step(w, abstract(w, accum), state)
    for n in range(steps):
        state, metrics = step(copied(state), batch(w, n, accum), hyper(n, 1e-2))
        assert metrics["finite"]
    return state


def leaves(tree_):
    actual = jax.tree_util.tree_leaves_with_path(weights.wide(tree_))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x)
        for path, x in actual
    }


def test_names_stand_for_groups_and_patterns_in_the_order_of_the_model():
    roles, stacked = (
        workload("fp32").model.roles,
        workload("fp32", 1, SCANNED).model.roles,
    )
    assert leaves_of(select_roles(stacked, ["h.*.ln_1.*"])) == [
        "h.ln_1.bias",
        "h.ln_1.scale",
    ]
    with pytest.raises(UserError):
        select_roles(stacked, ["h.0.ln_1.*"])
    assert leaves_of(select_roles(roles, ["embeddings"])) == [
        "wpe.embedding",
        "wte.embedding",
    ]
    every = select_roles(roles, ["biases", "kernels", "gains", "embeddings"])
    assert leaves_of(every) == leaves_of(roles)
    assert leaves_of(subtree_like(roles, every)) == leaves_of(roles)
    assert all(
        name.startswith("h.0.mlp.")
        for name in leaves_of(select_roles(roles, ["h.0.mlp.*"]))
    )
    with pytest.raises(
        UserError,
        match=(
            r"'h.7.\*' matches no parameter; valid: embeddings, kernels, gains,"
            r" biases, and"
        ),
    ):
        select_roles(roles, ["gains", "h.7.*"])


def leaves_of(roles):
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(roles)
    ]


def test_a_part_goes_back_to_its_place():
    whole = {"a": {"b": 1, "c": 2}, 3: {"d": 4}}
    part = subtree_like(whole, {"a": {"c": None}, 3: {"d": None}})
    assert part == {"a": {"c": 2}, 3: {"d": 4}}
    assert with_subtree(whole, {"a": {"c": 5}}) == {"a": {"b": 1, "c": 5}, 3: {"d": 4}}


@pytest.mark.parametrize(
    ("preset", "devices", "accum"),
    [
        ("fp32", 1, 1),
        ("scalify_fp8_fp16", 1, 2),
        ("fp8_delayed", 1, 1),
        slow("scalify_fp8_fp16", 8, 1),
    ],
)
def test_what_is_not_trained_keeps_every_bit_and_has_no_moments(preset, devices, accum):
    w = only("embeddings", "h.0.mlp.c_fc.*", preset=preset, devices=devices)
    before, after = first_state(w, seed=0), trained(w, 2, accum)
    names = set(leaves_of(w.trained_roles))
    assert len(names) == 4
    same = {
        name
        for (name, a), (_, b) in zip(
            leaves(before.params).items(), leaves(after.params).items(), strict=True
        )
        if np.array_equal(a, b)
    }
    assert same == set(leaves_of(w.model.roles)) - names
    moments = [x for x in tree.leaves(after.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(
        x.size for x in tree.leaves(w.trained(after.params))
    )


def test_what_is_trained_moves_as_if_all_were():
    """The first step's update of Adam, without a norm clip, knows nothing of other
    parameters."""
    part = only("kernels", "h.*.ln_1.*", spec=SCANNED)
    part = part._replace(plain_optimizer=without_clip())
    everything = part._replace(trainable=())
    a, b = (
        leaves(part.trained(trained(part, 1).params)),
        leaves(part.trained(trained(everything, 1).params)),
    )
    assert list(a) == list(b)
    for name, x in a.items():
        # The same sums, perhaps in another order; an update is 1e-2 times a quotient of
        # two roundings.
        np.testing.assert_allclose(
            x, b[name], rtol=0, atol=1e-2 * 64 * np.finfo(np.float32).eps, err_msg=name
        )


def without_clip():
    return optimizer_from_roles(
        "adamw", b1=0.9, b2=0.99, eps=1e-3, weight_decay=0.1, clip_norm=0.0
    )


@pytest.mark.parametrize(("spec", "accum"), [(SPEC, 2), (SCANNED, 1)])
def test_the_compiled_step_has_no_gradient_of_the_rest(spec, accum):
    whole, part = (
        products(only(*names, spec=spec), accum)
        for names in ((), ("embeddings", "gains", "biases"))
    )
    # a product of [inputs, tokens] and [tokens, outputs] for each kernel
    saved = 2 * 256 * KERNELS * spec.n_layer
    assert whole - part == saved
    w = only("embeddings", "gains", "biases", spec=spec)
    assert (flops_per_token(spec) - w.flops_per_token) * 256 == saved


def products(w, accum):
    """FLOPs of all matrix products of the compiled step, loops counted as often as they
    turn."""
    program = Program(compile_step(w, abstract(w, accum)).as_text())
    return sum(2 * math.prod(gemm.sizes) * gemm.times for gemm in program.gemms)


@pytest.mark.slow  # what devices send: parallel/test_distribute.py
def test_devices_do_not_send_each_other_what_is_not_trained():
    w = only(
        "embeddings", "gains", "biases", preset="scalify_fp8_fp16", devices=8
    )._replace(reduce=GradReduceConfig("fp8"))
    sent: dict = {}
    for c in Program(compile_step(w, abstract(w)).as_text()).collectives:
        sent[c.op, c.dtype] = sent.get((c.op, c.dtype), 0) + c.sent(8)
    assert ("all-to-all", "u8") not in sent  # in which the gradients of kernels go
    assert sent["all-gather", "u8"] == KERNELS * 7 / 8  # and the kernels themselves


def test_a_state_with_other_moments_is_refused_with_what_to_do():
    w = only("embeddings")
    meta = {"trainable": None}  # all parameters
    with pytest.raises(
        UserError,
        match=(
            r"resume=A was trained with 'train.trainable=\[\]', this is"
            r" .*\[embeddings\]': "
        ),
    ):
        check_same_trainable("A", meta, w)
    check_same_trainable("A", meta, only())
    # the same by other words
    check_same_trainable("A", {"trainable": ["w?e.*"]}, w)


def test_an_abstract_state_is_that_of_the_first():
    w = only("kernels", preset="scalify_fp8_fp16")
    like, state = abstract_state(w), first_state(w, seed=0)
    assert [x.shape for x in tree.leaves(like.opt_state)] == [
        x.shape for x in tree.leaves(state.opt_state)
    ]
    assert bits(first_state(w, seed=0)) == bits(state)


@pytest.mark.parametrize("spec", [SPEC, SCANNED, LLAMA])
@pytest.mark.parametrize(
    "names", [["kernels"], ["embeddings"], ["biases", "gains"], ["h.*.mlp.*"]]
)
def test_a_layer_is_frozen_where_its_kernel_is(spec, names):
    if spec is LLAMA:
        names = [name for name in names if name != "biases"]  # it has none
    w = only(*names, spec=spec)
    every = set(family_of(spec).linear_sizes(spec))
    frozen = {
        "kernels": set(),
        "h.*.mlp.*": {path for path in every if ".mlp." not in path},
    }.get(names[0], every)
    assert w.frozen_layers == frozen
    assert 0 < w.flops_per_token <= flops_per_token(spec)
    assert (w.flops_per_token == flops_per_token(spec)) is (not frozen)
