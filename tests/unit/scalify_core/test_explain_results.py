"""`explain` says of results that are off what it was, though no equation by itself
loses much."""

import inspect
import re

import jax.numpy as jnp
from draws import draw_normal

import scalify_core as sc


def scaled_normal():
    return sc.as_scaled_array(draw_normal(0, (8, 8)), dtype=jnp.float16)


def copied(s):
    # a product that reads FP16: a scaled matrix is not taken for one that copies
    return s @ (jnp.eye(8, dtype=s.dtype) + 0 * s)


def test_a_comparison_that_goes_the_other_way_is_named_though_no_equation_loses_much():
    def same(x):
        s = jnp.tanh(x)
        return jnp.mean(jnp.where(copied(s) == s, 1.0, 2.0))

    explanation = sc.explain(same, scaled_normal())
    assert explanation.first_loss is None
    assert explanation.errors[0] > 0.1
    assert "nothing is lost" not in str(explanation)
    line = inspect.getsourcelines(same)[1] + 2
    assert re.search(
        rf":{line} same, eq: [0-9.]+% of its elements are not those of plain",
        str(explanation),
    )


def test_roundings_that_are_left_of_a_difference_are_not_called_nothing():
    def rest(x):
        s = jnp.tanh(x)
        return jnp.sum(jnp.abs(copied(s) - s + 1e-5))

    explanation = sc.explain(rest, scaled_normal())
    assert explanation.first_loss is None
    assert "nothing is lost" not in str(explanation)
    assert "roundings are left where larger numbers cancel" in str(explanation)
    assert "nothing is lost" in str(sc.explain(copied, scaled_normal()))


def test_a_result_that_is_off_by_a_hundredth_is_named():
    """What plain FP16 has lost must be right to 1%, or be named: a hundredth is where
    `explain` begins."""

    def rest(x):
        s = jnp.tanh(x)
        return copied(s) - s * (1 - 1 / 64)

    explanation = sc.explain(rest, scaled_normal())
    assert 0.01 < explanation.errors[0] < 2**-6
    assert "nothing is lost" not in str(explanation)


def test_what_a_comparison_made_zero_is_not_said_to_want_a_wider_format():
    def kept(x):
        s = jnp.tanh(x)
        return jnp.where(s.astype(jnp.float16).astype(s.dtype) >= s, s, 0.0) * 1.5

    actual = str(sc.explain(kept, scaled_normal()))
    assert re.search(
        r"first loss: .* are zero, which are not in plain FP32, .*a comparison.* the"
        r" other way",
        actual,
    )
    assert "wider format" not in actual
