"""`explain` names the line where values are lost, shows each of its figures right, and
names nothing that is right."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF, error
from draws import draw_normal
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

import scalify_core as sc
from scalify_core.debug.explanation import Figures
from scalify_core.ops.matmul import Rounded, rounded_product

# Most of what can be lost is at scales that are propagated.
explain = functools.partial(sc.explain, scales="static")


def normal(*shape, seed=0):
    return draw_normal(seed, shape)


def scaled(tree, dtype=HALF):
    return sc.as_scaled_array(tree, dtype=dtype)


def line_of(fun, text):
    """Return the number of the first line of `fun` that has `text`."""
    lines, first = inspect.getsourcelines(fun)
    return first + next(i for i, line in enumerate(lines) if text in line)


def rows(explanation, primitive, backward=False):
    key = primitive, backward
    return [r for r in explanation.rows if (r.primitive, r.place.backward) == key]


def total(ws, x, size=1.0, rescaled=lambda x: x):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(rescaled(x) ** 2) * size


def test_each_row_has_its_figures():
    x, w = normal(8, 16), normal(16, 4, seed=1)
    explanation = explain(lambda x, w: jnp.tanh(x @ w), scaled(x), scaled(w))
    assert explanation.first_loss is None
    assert "nothing is lost" in str(explanation)
    (dot,) = rows(explanation, "dot_general")
    assert (dot.shape, dot.dtype, dot.turns) == ((8, 4), "float16", 1)
    f, rms = dot.figures, float(jnp.sqrt(jnp.mean((x @ w) ** 2)))
    assert f.scale * f.measured == pytest.approx(rms, rel=1e-3)
    # sqrt(16) independent terms
    assert f.scale * f.expected == pytest.approx(4.0, rel=0.5)
    assert f.flushed == f.saturated == 0
    assert 0 < f.error < 2.0**-10


def test_a_scale_that_is_astray_is_traced_to_its_line_and_the_remedy_helps():
    weights = scaled([normal(16, 16, seed=i) / 4 for i in range(3)])
    args = weights, normal(8, 16), 1e-7
    explanation = explain(jax.grad(total), *args)
    line = r"test_explain.py:\d+ total, .* of the backward pass"
    assert re.search(f"{line}: .* are zero in float16", explanation.first_loss)
    remedy = f"too large; put dynamic_rescale_rms_grad at {line}, where it begins"
    assert re.search(remedy, explanation.first_loss)
    assert explanation.first_loss in str(explanation)
    assert max(explanation.errors) > 0.5
    rescaled = functools.partial(total, rescaled=sc.static.dynamic_rescale_rms_grad)
    assert explain(jax.grad(rescaled), *args).first_loss is None


def test_saturation_is_named():
    def grown(x):
        return jnp.exp(x) * 2

    explanation = explain(grown, scaled(jnp.asarray([10.5, 11.5, 12.5])))
    assert "66.7% of its elements saturate in float16" in explanation.first_loss
    assert explanation.first_row.place.line == line_of(grown, "jnp.exp")


def test_small_numbers_beside_large_ones_are_missed_though_the_norm_is_right():
    joined = lambda small: explain(
        lambda a, b: jnp.concatenate([a, b]),
        scaled(normal(8) * small),
        scaled(normal(8) * 1e5),
    )
    explanation = joined(1e-6)
    assert "50.0% of its elements" in explanation.first_loss
    assert "one scale does not hold numbers so far apart" in explanation.first_loss
    assert explanation.errors[0] < 1e-6
    # Plain FP16 would lose these, too.
    assert joined(1e-9).first_loss is None


def test_a_shard_map_and_an_empty_loop_are_one_equation_each():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    how = {"mesh": mesh, "in_specs": jax.P("d"), "out_specs": jax.P("d")}
    mapped = jax.shard_map(lambda x: lax.psum(x * 2, "d"), **how)
    assert max(explain(mapped, scaled(normal(4, 8))).errors) < 1e-3
    empty = lambda x, ws: lax.scan(lambda h, w: (h @ w, h), x, ws)
    assert explain(empty, scaled(normal(4)), scaled(normal(0, 4, 4))).errors[0] == 0


def test_calls_are_inlined_and_library_functions_stand_at_the_line_that_calls_them():
    @jax.jit
    def inner(x):
        return jax.nn.silu(x)

    def outer(x, w):
        x = jax.checkpoint(inner)(x)
        return jnp.sum(jax.nn.silu(x @ w))  # another call of it

    args = scaled((normal(4, 4), normal(4, 4, seed=1)))
    explanation = explain(jax.grad(outer), *args)
    lines = {r.place.line for r in explanation.rows if r.primitive == "logistic"}
    assert lines == {line_of(inner, "silu"), line_of(outer, "another")}


def test_products_in_fp8_are_compared_with_exact_ones():
    def loss(w, x):
        return jnp.sum(sc.fp8_dot_general(x, w, (((1,), (0,)), ((), ())))) * 1e-6

    args = scaled((normal(16, 16), normal(16, 16, seed=1) * 1e-9))
    explanation = explain(jax.grad(loss), *args)
    assert 1e-3 < max(explanation.errors) < 0.06
    assert explanation.first_loss is None
    operand = next(r for r in explanation.rows if r.dtype == "float8_e4m3fn")
    assert 0.01 < operand.figures.error < 0.04


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_operands_with_a_scale_for_each_row_are_no_loss(scales):
    def rounded(x):
        top = jnp.max(jnp.abs(x), axis=1, keepdims=True)
        row_scales = jnp.exp2(jnp.ceil(jnp.log2(top / 448)))
        return (x / row_scales).astype(jnp.float8_e4m3fn), row_scales

    wide = lambda data, row_scales: data.astype(jnp.float32) * row_scales

    def forward(x, w):
        operands = rounded(x), rounded(w.T)
        x_wide, w_wide = (wide(*operand) for operand in operands)
        return x_wide @ w_wide.T, *operands

    def backward(x, w, g):
        return g @ wide(*w), wide(*x).T @ g

    def loss(w, x):
        return jnp.sum(jnp.square(rounded_product(x, w, Rounded(forward, backward))))

    rows = 2.0 ** jnp.arange(16)[:, None]
    args = scaled((normal(16, 16), rows * normal(16, 16, seed=1)))
    explanation = explain(jax.grad(loss), *args, scales=scales)
    assert explanation.first_loss is None
    assert max(row.figures.error for row in explanation.rows) < 2**-11


def test_saturated_masks_and_gradients_that_are_zero_but_for_rounding_are_no_loss():
    def attention(q, k, v, bias):
        # The bias moves all logits alike: its gradient is zero.
        logits = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), q @ (k + bias).T, -1e9)
        # The checkpoint stores them in FP16.
        return jnp.sum((jax.checkpoint(jax.nn.softmax)(logits) @ v) ** 2)

    args = scaled([*(normal(8, 8, seed=i) for i in range(3)), normal(1, 8, seed=4)])
    explanation = explain(jax.grad(attention, argnums=(0, 1, 2, 3)), *args)
    assert explanation.first_loss is None
    assert max(explanation.errors[:3]) < 0.01
    (masked,) = rows(explanation, "select_n")
    assert masked.figures.measured < 16
    assert masked.figures.error < 0.01


def test_zeros_beside_much_larger_numbers_are_named_where_the_norm_is_right():
    """Gradients that vanish from layer to layer, stacked by a scan."""

    def loss(layers, x):
        turn = lambda h, w: (jnp.tanh(h @ w + 0.5), None)
        return jnp.sum(lax.scan(turn, x, layers)[0].astype(jnp.float32))

    args = scaled((normal(8, 8, 8) * 0.006, normal(4, 8)))
    actual = sc.explain(jax.grad(loss), *args)
    zeros = np.mean(sc.asarray(sc.scalify(jax.grad(loss))(*args)) == 0)
    assert zeros > 0.1
    assert actual.first_loss is None
    shown = f"; but zero in float16 beside much larger ones are {zeros:.1%} of the"
    assert shown in str(actual)


def test_effects_happen_once(capfd):
    log = jax.new_ref(jnp.zeros(2))

    def with_effects(x):
        jax.debug.print("largest {x}", x=jnp.max(x))
        log[...] += 1.0
        return x * log[...]

    assert explain(with_effects, scaled(jnp.asarray([1.0, 3.0]))).errors == [0.0]
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest 3.0") == 1
    assert_array_equal(log[...], np.ones(2))


def layer(h, w):
    return h + jnp.tanh(h @ w), jnp.sum(h)


def scan_loss(ws, x):
    h, sums = lax.scan(layer, x, ws, reverse=True)
    return jnp.mean(h**2) + 1e-3 * jnp.sum(sums)


@pytest.mark.parametrize(
    ("scales", "dtypes"),
    [("auto", {"float16", "float32"}), ("static", {"float16"})],
)
def test_turns_of_a_scan_are_rows_together_and_errors_are_those_of_scalify(
    scales, dtypes
):
    args = scaled((normal(4, 8, 8) / 3, normal(4, 8, seed=3)))
    grad = jax.grad(scan_loss)
    explanation = sc.explain(grad, *args, scales=scales)
    assert explanation.first_loss is None
    assert {r.dtype for r in explanation.rows} == dtypes
    assert [r.turns for r in rows(explanation, "dot_general")] == [4]
    assert {r.turns for r in rows(explanation, "dot_general", backward=True)} == {4}
    assert any(line.endswith(" layer") for line in str(explanation).splitlines())
    off = error(sc.scalify(grad, scales=scales)(*args), grad(*sc.asarray(args)))
    # sums in another order round otherwise
    assert_allclose(explanation.errors, [off], rtol=0.02)
    assert off < 0.01


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_loops_branches_and_calls_are_followed_as_they_run(scales):
    def halved(x, w):
        x = lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 1, lambda x: x @ w, x)
        x = lax.cond(x[0] > 0, lambda x: jnp.sin(x) @ w, lambda x: jnp.cos(x) @ w, x)
        return jax.checkpoint(jax.jit(lambda x: jnp.sum((x @ w) ** 2)))(x)

    for sign, taken, other in ((1, "sin", "cos"), (-1, "cos", "sin")):
        args = scaled((sign * jnp.asarray([100.0, 3.0, 5.0]), jnp.eye(3) / 2))
        explanation = sc.explain(halved, *args, scales=scales)
        assert sorted(r.turns for r in rows(explanation, "dot_general")) == [1, 1, 7]
        assert len(rows(explanation, taken)) == 1
        assert not rows(explanation, other)
        assert max(explanation.errors) < 1e-3


def counted(x):
    total = jax.new_ref(jnp.zeros(x.shape))

    def body(i, carry):
        total[...] += x @ x
        return carry

    lax.fori_loop(0, 3, body, 0)
    return total[...] * 1e-3


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_references_of_the_program_are_followed(scales):
    x = scaled(normal(8, 8))
    explanation = sc.explain(counted, x, scales=scales)
    assert explanation.first_loss is None
    assert [row.turns for row in rows(explanation, "dot_general")] == [3]
    off = error(sc.scalify(counted, scales=scales)(x), counted(sc.asarray(x)))
    assert_allclose(explanation.errors, [off], atol=1e-6)


def test_refusals():
    with pytest.raises(ValueError, match="scales='measured'"):
        sc.explain(jnp.sin, scaled(normal(3)), scales="measured")
    with pytest.raises(ValueError, match="as_scaled_array"):
        explain(jnp.sin, normal(3))
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda x: explain(jnp.sin, x).errors)(scaled(normal(3)))


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_sums_of_booleans_and_integers_have_no_row(scales):
    def counts(x):
        positive = x > 0
        product = positive.astype(jnp.int32) @ jnp.ones(8, jnp.int32)
        return x * 2, positive.sum(), product

    explanation = sc.explain(counts, scaled(normal(8, 8)), scales=scales)
    assert [row.primitive for row in explanation.rows] == ["mul"]


# Products that lose what one scale does not hold.


def far(h):
    """Return factors over 50 octaves in the dtype of `h`: an FP32 table would make FP32
    of `h`."""
    return (10.0 ** jnp.arange(-8.0, 8.0)[:, None]).astype(h.dtype)


def summed_too(h):
    """Return a sum over the rows of `h`, which is read by rows elsewhere, too: so it
    has one scale."""
    return jnp.ones((16, 16), h.dtype).T @ h * 1e-20


def rows_resized(x, w):
    h = x * far(x)
    return (h @ w) / far(h), summed_too(h)


def columns_resized(x, w):
    h = w * far(w).T
    return (x @ h) / far(h).T + summed_too(h.T).T


LOSING = {
    "rows": rows_resized,
    "columns": columns_resized,
}
RIGHT = {
    "nowhere": lambda x, w: jnp.exp(-30 + x) @ (w * 1e9),
    "each row": lambda x, w: ((x * far(x)) @ w) / far(x),
}


@pytest.mark.parametrize("name", [*LOSING, *RIGHT])
def test_losses_of_one_scale_in_a_product_are_named(name):
    fun = (LOSING | RIGHT)[name]
    args = scaled((normal(16, 16, seed=3), normal(16, 16, seed=4)))
    off = error(sc.scalify(fun)(*args), fun(*sc.asarray(args)))
    assert (off > 0.01) == (name in LOSING)
    assert (sc.explain(fun, *args).first_loss is not None) == (name in LOSING)


# Results that are off, though no equation by itself loses much.


def copied(s):
    # a product that reads FP16: a scaled matrix is not taken for one that copies
    return s @ (jnp.eye(8, dtype=s.dtype) + 0 * s)


def same(x):
    s = jnp.tanh(x)
    return jnp.mean(jnp.where(copied(s) == s, 1.0, 2.0))


def hundredth(x):
    s = jnp.tanh(x)
    return copied(s) - s * (1 - 1 / 64)


UNEXPLAINED = {
    same: (
        rf":{line_of(same, 'copied')} same, eq: [0-9.]+% of its elements are not those",
        0.1,
    ),
    # A hundredth is where `explain` begins.
    hundredth: ("roundings are left where larger numbers cancel", 0.01),
}


@pytest.mark.parametrize("fun", UNEXPLAINED)
def test_results_that_are_off_are_named_though_no_equation_loses_much(fun):
    shown, least = UNEXPLAINED[fun]
    explanation = sc.explain(fun, scaled(normal(8, 8)))
    assert explanation.first_loss is None
    assert explanation.errors[0] > least
    assert "nothing is lost" not in str(explanation)
    assert re.search(shown, str(explanation))


def test_zeros_by_a_comparison_do_not_want_a_wider_format():
    def selected(x):
        s = jnp.tanh(x)
        return jnp.where(s.astype(HALF).astype(s.dtype) >= s, s, 0.0) * 1.5

    actual = str(sc.explain(selected, scaled(normal(8, 8))))
    zeros = r"first loss: .* are zero, which are not in plain FP32, .*a comparison.*"
    assert re.search(f"{zeros} the other way", actual)
    assert "wider format" not in actual


def test_values_near_the_smallest_normal_number_lose_bits_before_they_are_zero():
    tiny = 2.0**-14
    figures = Figures(
        scale=1.0, expected=1.0, measured=tiny, due=8 * tiny, flushed=0.0,
        flushed_norm=0.0, vanished=0.0, saturated=0.0, error=0.1, operand_error=0.0,
        operand_vanished=0.0,
    )  # fmt: skip
    for due, loses in ((8 * tiny, True), (32 * tiny, False), (0.0, False)):
        assert figures._replace(due=due).loses(2.0**-11, tiny) == loses
