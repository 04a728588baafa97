"""Six kinds of Flax models, ten training steps each under scalify: the losses of the plain run."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import quick

from scalify_core import as_scaled_array, asarray, dynamic_rescale_rms, scalify, tree
from trainer.models.gpt2 import functional
from trainer.models.spec import GPT2Spec

STEPS = 10
# In each step an FP16 rounding of the parameters may move the loss by about as much, relatively.
FP16_TOLERANCE = STEPS * 2.0**-10


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (32, 32):
            x = nn.gelu(nn.Dense(width)(x))
        return nn.Dense(4)(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.avg_pool(nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(8, (3, 3))(x))), (2, 2), (2, 2))
        return nn.Dense(4)(x.reshape(x.shape[0], -1))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.RNN(nn.LSTMCell(16))(x)[:, -1])


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y)
        x = x + nn.Dense(16)(nn.silu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(4)(x.mean(1))


class MixtureOfExperts(nn.Module):
    """Four experts, the two best of which answer for a token, weighted by their router's softmax."""

    @nn.compact
    def __call__(self, x):
        scores = nn.softmax(nn.Dense(4)(x))
        best, index = jax.lax.top_k(scores, 2)
        gates = jnp.zeros_like(scores).at[jnp.arange(x.shape[0])[:, None], index].set(best)
        w_in = self.param("w_in", nn.initializers.lecun_normal(batch_axis=0), (4, x.shape[-1], 16))
        w_out = self.param("w_out", nn.initializers.lecun_normal(batch_axis=0), (4, 16, 4))
        hidden = nn.relu(jnp.einsum("nd,edf->nef", x, w_in))
        return jnp.einsum("ne,nef,efo->no", gates, hidden, w_out)


def linen(module, *shape):
    x = jax.random.normal(jax.random.key(1), shape)
    y = jax.random.randint(jax.random.key(2), shape[:1], 0, 4)

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(module.apply(params, x), y).mean()

    return loss, module.init(jax.random.key(0), x), (x, y)


def gpt2():
    init, bind, *_ = functional(GPT2Spec(vocab_size=61, context=16, n_layer=1, n_head=2, d_model=16))
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, 61)
    return lambda params, x, y: bind(params).loss(x, y), init(jax.random.key(0)), (tokens[:, :-1], tokens[:, 1:])


MODELS = {
    "mlp": lambda: linen(MLP(), 16, 8),
    "cnn": lambda: linen(CNN(), 8, 8, 8, 3),
    "lstm": lambda: linen(LSTM(), 8, 6, 8),
    "transformer_encoder": lambda: linen(Encoder(), 4, 8, 16),
    "gpt2": gpt2,
    "mixture_of_experts": lambda: linen(MixtureOfExperts(), 16, 8),
}


def losses(name, dtype, plain_dtype=jnp.float32):
    """Losses of ten steps: plain if `dtype` is None, else scaled with data of this dtype."""
    loss_fn, params, batch = MODELS[name]()
    params = jax.tree.map(lambda p: p.astype(plain_dtype), params)
    # Each optimiser has a test of its own; here it is the models that differ.
    tx = optax.adam(1e-2, eps=1e-8) if name == "mlp" else optax.sgd(5e-2, momentum=0.9)

    def step(params, state, *batch):
        loss, gradient = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = tx.update(gradient, state, params)
        # The moments have run-time scales: nobody knows the size of a gradient's square before it is there.
        state = jax.tree.map(lambda x: dynamic_rescale_rms(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    if dtype is None:
        run = jax.jit(step)
    else:
        params, batch = as_scaled_array((params, batch), dtype=dtype)
        # Biases start at zero: they get the size that they will have.
        params = tree.map_arrays(lambda p: p.rescale(2.0**-4) if float(p.scale) < 2.0**-60 else p, params)
        params, batch = tree.with_static_scales((params, batch))
        state = as_scaled_array(state, dtype=dtype)
        like, scaled = params, scalify(step)

        @jax.jit
        def run(params, state, *batch):
            params, state, loss = scaled(params, state, *batch)
            return tree.rescaled_like(params, like), state, asarray(loss)

    out = []
    for _ in range(STEPS):
        params, state, loss = run(params, state, *batch)
        out.append(float(loss))
    return np.asarray(out)


@pytest.mark.parametrize("name", quick(MODELS, "mixture_of_experts"))
def test_ten_steps_have_the_losses_of_the_plain_run(name):
    plain = losses(name, None)
    assert plain[-1] < plain[0]
    np.testing.assert_allclose(losses(name, jnp.float32), plain, rtol=1e-5)
    np.testing.assert_allclose(losses(name, jnp.float16), plain, rtol=FP16_TOLERANCE)


def test_plain_fp16_fails_where_scaled_fp16_does_not():
    assert not np.isfinite(losses("mlp", None, plain_dtype=jnp.float16)).all()
    assert np.isfinite(losses("mlp", jnp.float16)).all()
