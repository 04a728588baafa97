"""The call of cuDNN's FP8 backward pass, on a CPU: its operands are bound as XLA binds
them, and cuDNN's graph is computed in FP32."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import normal

from scalify_core.numerics.formats import E4M3
from trainer.precision import cudnn_fp8_attention as cudnn
from trainer.precision import fp8_attention as module

# openxla/xla, cuda_dnn.cc: the numbers that follow the six tensors
XLA_NUMBERS = (
    *("descale_q", "descale_k", "descale_v", "descale_s", "descale_o", "descale_dO"),
    *("descale_dP", "scale_s", "scale_dP", "scale_dQ", "scale_dK", "scale_dV"),
)


def rounded(x):
    """E4M3, saturated as cuDNN does."""
    return jnp.clip(x, -E4M3.max, E4M3.max).astype(jnp.float8_e4m3fn)


def product(spec, *operands):
    return jnp.einsum(spec, *(x.astype(jnp.float32) for x in operands))


def backward_of_cudnn(*operands, scale, use_causal_mask, layout):
    """The graph of cudnn-frontend's sdpa_fp8_bwd.h."""
    assert layout == "BTNH"
    assert use_causal_mask
    q, k, v, o, do, stats = operands[:6]
    scalars = (x.reshape(()) for x in operands[6:])
    s = SimpleNamespace(**dict(zip(XLA_NUMBERS, scalars, strict=True)))
    groups = q.shape[2] // k.shape[2]
    k_all, v_all = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    logits = product("bthk,bshk->bhts", q, k_all) * scale * s.descale_q * s.descale_k
    visible = jnp.tril(jnp.ones(logits.shape[2:], bool))
    p = jnp.exp(jnp.where(visible, logits, -jnp.inf) - stats[..., None])
    dp = product("bthk,bshk->bhts", do, v_all) * s.descale_dO * s.descale_v
    delta = product("bthk,bthk->bht", do, o) * s.descale_dO * s.descale_o
    ds = p * (dp - delta[..., None]) * scale
    p8, ds8 = rounded(p * s.scale_s), rounded(ds * s.scale_dP)
    dk = product("bhts,bthk->bshk", ds8, q) * s.descale_dP * s.descale_q
    dv = product("bhts,bthk->bshk", p8, do) * s.descale_s * s.descale_dO
    results = [
        product("bhts,bshk->bthk", ds8, k_all) * s.descale_dP * s.descale_k,
        *(x.reshape(*k.shape[:3], groups, k.shape[3]).sum(3) for x in (dk, dv)),
    ]
    scales = s.scale_dQ, s.scale_dK, s.scale_dV
    outputs = [rounded(x * scale) for x, scale in zip(results, scales, strict=True)]
    amax = [jnp.max(jnp.abs(x)).reshape(1, 1, 1, 1) for x in (*results, ds)]
    return *outputs, *amax


def usual_operands():
    q, g = normal(0, 1, 64, 4, 16), normal(3, 1, 64, 4, 16)
    return q, normal(1, 1, 64, 2, 16), normal(2, 1, 64, 2, 16), g


def one_key_for_all_queries():
    """Its gradients leave the guessed scales behind."""
    q, k, v, _ = usual_operands()
    return q.at[..., 0].set(4.0), k.at[:, 0, :, 0].set(6.0), v, jnp.ones_like(q)


@pytest.mark.parametrize(
    ("made", "calls"), [(usual_operands, 1), (one_key_for_all_queries, 2)]
)
def test_gradients_are_right_with_operands_bound_as_xla_binds_them(
    monkeypatch, made, calls
):
    primitive = SimpleNamespace(bind=backward_of_cudnn)
    library = SimpleNamespace(
        _dot_product_attention_fp8_bwd_p_wrapper=primitive,
        AttentionLayout=SimpleNamespace(BTNH=SimpleNamespace(value="BTNH")),
    )
    monkeypatch.setattr(cudnn, "_library", lambda: library)
    taken = []

    cond = jax.lax.cond

    def branch(is_wrong, again, once):
        taken.append(is_wrong)
        return cond(is_wrong, again, once)

    monkeypatch.setattr(jax.lax, "cond", branch)

    @jax.jit
    def both(*operands):
        settings = {"causal": True, "logit_scale": 0.25, "simulate": False}
        *operands, gradient = operands
        _, residuals = module._forward(*operands, **settings)
        expected = module._backward(residuals, gradient, **settings)
        actual = module._cuda_backward(residuals, gradient, **settings)
        (is_wrong,) = taken
        return actual, expected, 1 + is_wrong

    actual, expected, number = both(*made())
    assert number == calls
    for one, other in zip(actual, expected, strict=True):
        # Sums in another order: an element may be rounded to its neighbor, 2^-3 away.
        assert np.linalg.norm(one - other) < 2.0**-7 * np.linalg.norm(other)
