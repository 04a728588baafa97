"""A small model of every family, its programs compiled once for all tests of a
worker."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from trainer.models.gpt2 import model as gpt2
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama import model as llama
from trainer.models.llama.spec import LlamaSpec
from trainer.parallel.leafwise import evaluate_leafwise

GPT2 = GPT2Spec(vocab_size=100, context=16, n_layer=2, n_head=2, d_model=16)
LLAMA = LlamaSpec(
    vocab_size=100, context=16, n_layer=2, n_head=4, n_kv_head=2, d_model=16, tied=True
)
TOKENS = np.random.default_rng(0).integers(0, 100, (2, 17)).astype(np.int32)
# Two programs that differ in nothing but the order of sums: a few dozen roundings on
# values of order 1.
REORDERED = 64 * float(jnp.finfo(jnp.float32).eps)


def build_functions(spec, **how):
    return (llama if isinstance(spec, LlamaSpec) else gpt2).build_functions(spec, **how)


def initial(model, seed=0):
    """Return `jax.jit(model.init)` of a seed, bit for bit, by programs that all models
    share."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda shapes: jax.tree.map(lambda _: device, shapes)
    params = evaluate_leafwise(model.init, jax.random.key(seed), place=place)
    return jax.device_put(jax.device_get(params))  # they may go to other devices


@functools.cache
def compiled(spec, compute_dtype=jnp.float32):
    """Initial parameters; loss and gradients; logits."""
    model = build_functions(spec, compute_dtype=compute_dtype)
    bind = model.bind
    loss_and_grads = jax.jit(
        jax.value_and_grad(lambda p: bind(p).loss(TOKENS[:, :-1], TOKENS[:, 1:]))
    )
    logits = jax.jit(
        lambda p, tokens, segments=None, **keys: bind(p)(tokens, segments, **keys)
    )
    return initial(model), loss_and_grads, logits


def assert_close(a, b, atol=REORDERED):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=0), a, b)


def matmul_flops(jaxpr):
    """The FLOPs of a traced program's products."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            k = 1
            for axis in contracted:
                k *= eqn.invars[0].aval.shape[axis]
            total += 2 * k * eqn.outvars[0].aval.size
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += matmul_flops(inner)
    return total
