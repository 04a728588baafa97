"""`explain` names the products that lose what one scale does not hold."""

import jax.numpy as jnp
import pytest
from beside_plain import error
from draws import draw_normal
from jax import lax

import scalify_core as sc


def normal(*shape, seed=0):
    return draw_normal(seed, shape)


def scaled(tree, scale=None):
    return sc.as_scaled_array(tree, scale, dtype=jnp.float16)


FAR = 10.0 ** jnp.arange(-8.0, 8.0)[:, None]  # 50 octaves


def far(h):
    """In the dtype of `h`: as an FP32 table it would make FP32 of what it is computed
    with."""
    return FAR.astype(h.dtype)


def summed_too(h):
    """A sum over the rows of what is read by rows elsewhere, too: so it has one
    scale."""
    return jnp.ones((16, 16), h.dtype).T @ h * 1e-20


# A product, and whether its one scale loses something.
LINES = {
    "rows": (lambda x, w: (lambda h: (h @ w) / far(h) + summed_too(h))(x * far(x)), 1),
    "columns": (
        lambda x, w: (lambda h: (x @ h) / far(h).T + summed_too(h.T).T)(w * far(w).T),
        1,
    ),
    "nowhere": (lambda x, w: jnp.exp(-30 + x) @ (w * 1e9), 0),
    "each row": (lambda x, w: ((x * far(x)) @ w) / far(x), 0),
    "outer": (
        lambda x, w: jnp.tensordot(x[:, 0] * far(x)[:, 0], w[0], 0) / far(x),
        0,
    ),
}
OPERANDS = normal(16, 16, seed=3), normal(16, 16, seed=4)


@pytest.mark.parametrize("kind", LINES)
def test_explain_names_what_one_scale_loses_in_a_product(kind):
    (fun, loses), args = LINES[kind], scaled(OPERANDS)
    is_lost = error(sc.scalify(fun)(*args), fun(*sc.asarray(args))) > 0.01
    assert is_lost == bool(loses)
    assert (sc.explain(fun, *args).first_loss is not None) == is_lost


RESIZED = {
    "multiplied further on": lambda h: (
        (h @ jnp.eye(16, dtype=h.dtype)).T * (1e-8 / far(h).T)
    ),
    "in a loop": lambda h: lax.fori_loop(0, 1, lambda i, h: h / far(h), h),
}


@pytest.mark.parametrize("kind", RESIZED)
def test_rows_that_are_given_another_size_afterwards_are_a_loss(kind):
    def fun(x, w):
        h = x * far(x)
        return RESIZED[kind](h @ w), summed_too(h)

    assert sc.explain(fun, *scaled(OPERANDS)).first_loss is not None
