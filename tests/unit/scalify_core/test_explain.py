"""`explain` names the line where values are lost, shows each of its figures right, and
says nothing of what is well."""

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

# Most of what can be lost is at scales that are propagated; those that are measured
# stand at the end.
explain = functools.partial(sc.explain, scales="static")


def normal(*shape, seed=0):
    return draw_normal(seed, shape)


def scaled(tree, dtype=HALF):
    return sc.as_scaled_array(tree, dtype=dtype)


def line_of(fun, text):
    """The number of the first line of `fun` that has `text`."""
    lines, first = inspect.getsourcelines(fun)
    return first + next(i for i, line in enumerate(lines) if text in line)


def rows(explanation, primitive, backward=False):
    return [
        r
        for r in explanation.rows
        if r.primitive == primitive and r.place.backward == backward
    ]


def total(ws, x, size=1.0):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2) * size  # the last line


def test_a_program_that_loses_nothing_is_said_to_and_each_row_has_its_figures():
    explanation = explain(
        lambda x, w: jnp.tanh(x @ w),
        scaled(normal(8, 16)),
        scaled(normal(16, 4, seed=1)),
    )
    assert explanation.first_loss is None
    assert "nothing is lost" in str(explanation)
    (dot,) = rows(explanation, "dot_general")
    assert (dot.shape, dot.dtype, dot.turns) == ((8, 4), "float16", 1)
    f = dot.figures
    exact = normal(8, 16) @ normal(16, 4, seed=1)
    assert f.scale * f.measured == pytest.approx(
        float(jnp.sqrt(jnp.mean(exact**2))), rel=1e-3
    )
    # sqrt(16) independent terms
    assert f.scale * f.expected == pytest.approx(4.0, rel=0.5)
    assert f.flushed == f.saturated == 0
    assert 0 < f.error < 2.0**-10


def test_a_scale_that_is_astray_is_traced_to_the_line_that_made_it_so():
    explanation = explain(
        jax.grad(total),
        scaled([normal(16, 16, seed=i) / 4 for i in range(3)]),
        normal(8, 16),
        1e-7,
    )
    assert re.search(
        r"test_explain.py:\d+ total, .* of the backward pass: .* are zero in float16",
        explanation.first_loss,
    )
    assert re.search(
        r"too large; put dynamic_rescale_rms_grad at test_explain.py:\d+ total, .* of the"
        r" backward pass, where it begins to be",
        explanation.first_loss,
    )
    assert "dynamic_rescale_rms_grad" in explanation.first_loss
    assert explanation.first_loss in str(explanation)
    assert max(explanation.errors) > 0.5


def test_what_it_tells_one_to_do_helps():
    def rescaled(ws, x, size):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(sc.static.dynamic_rescale_rms_grad(x) ** 2) * size

    ws, x = scaled([normal(16, 16, seed=i) / 4 for i in range(2)]), normal(8, 16)
    assert explain(jax.grad(rescaled), ws, x, 1e-7).first_loss is None


def test_saturation_is_named():
    def grown(x):
        return jnp.exp(x) * 2

    explanation = explain(grown, scaled(jnp.asarray([10.5, 11.5, 12.5])))
    assert "66.7% of its elements saturate in float16" in explanation.first_loss
    assert explanation.first_row.place.line == line_of(grown, "jnp.exp")


def test_small_numbers_beside_large_ones_are_missed_though_they_are_little_of_the_norm():
    def joined(a, b):
        return jnp.concatenate([a, b])

    explanation = explain(joined, scaled(normal(8) * 1e-6), scaled(normal(8) * 1e5))
    assert "50.0% of its elements" in explanation.first_loss
    assert "one scale does not hold numbers so far apart" in explanation.first_loss
    assert explanation.errors[0] < 1e-6
    # What plain FP16 would lose too is no loss of the scale's.
    assert (
        explain(joined, scaled(normal(8) * 1e-9), scaled(normal(8) * 1e5)).first_loss
        is None
    )


def scan_loss(ws, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w), jnp.sum(h)

    h, sums = lax.scan(layer, x, ws, reverse=True)
    return jnp.mean(h**2) + 1e-3 * jnp.sum(sums)


def test_a_shard_map_and_an_empty_loop_are_one_equation_each():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(
        lambda x: lax.psum(x * 2, "d"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    assert max(explain(mapped, scaled(normal(4, 8))).errors) < 1e-3
    empty = explain(
        lambda x, ws: lax.scan(lambda h, w: (h @ w, h), x, ws),
        scaled(normal(4)),
        scaled(normal(0, 4, 4)),
    )
    assert empty.errors[0] == 0


def test_calls_are_inlined_and_library_functions_stand_at_the_line_that_calls_them():
    @jax.jit
    def inner(x):
        return jax.nn.silu(x)

    def outer(x, w):
        x = jax.checkpoint(inner)(x)
        return jax.nn.silu(x @ w)  # another call of it

    explanation = explain(
        jax.grad(lambda x, w: jnp.sum(outer(x, w))),
        scaled(normal(4, 4)),
        scaled(normal(4, 4, seed=1)),
    )
    lines = {r.place.line for r in explanation.rows if r.primitive == "logistic"}
    assert lines == {line_of(inner, "silu"), line_of(outer, "another")}


def test_lines_that_were_typed_at_a_prompt_are_the_users_too():
    names: dict = {}
    exec(
        compile(
            "import jax.numpy as jnp\ndef typed(x):\n    return jnp.sin(x)",
            "<stdin>",
            "exec",
        ),
        names,
    )
    explanation = sc.explain(names["typed"], scaled(normal(3)))
    assert [str(r.place) for r in explanation.rows] == ["<stdin>:3 typed"]


def test_products_in_fp8_are_compared_with_exact_ones():
    """Not with what FP8 makes of numbers without a scale."""

    def loss(w, x):
        return jnp.sum(sc.fp8_dot_general(x, w, (((1,), (0,)), ((), ())))) * 1e-6

    explanation = explain(
        jax.grad(loss), scaled(normal(16, 16)), scaled(normal(16, 16, seed=1) * 1e-9)
    )
    assert 1e-3 < max(explanation.errors) < 0.06
    assert explanation.first_loss is None
    operand = next(r for r in explanation.rows if r.dtype == "float8_e4m3fn")
    assert 0.01 < operand.figures.error < 0.04


def test_casts_of_the_users_own_are_not_rounded_in_the_shadow():
    def halves(x, w):
        return (x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)

    x, w = normal(8, 8) * 2.0**-20, normal(8, 8, seed=1) * 2.0**-20
    # of which plain FP16 would make zeros
    explanation = explain(halves, scaled(x), scaled(w))
    assert explanation.rows
    assert explanation.errors[0] < 0.01


def test_masks_saturate_on_purpose_and_gradients_that_are_zero_but_for_rounding_are_no_loss():
    def attention(q, k, v, bias):
        # which the bias moves alike
        logits = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), q @ (k + bias).T, -1e9)
        # which stores them in FP16
        return jnp.sum((jax.checkpoint(jax.nn.softmax)(logits) @ v) ** 2)

    args = (
        *(scaled(normal(8, 8, seed=i)) for i in range(3)),
        scaled(normal(1, 8, seed=4)),
    )
    explanation = explain(jax.grad(attention, argnums=(0, 1, 2, 3)), *args)
    assert explanation.first_loss is None
    assert max(explanation.errors[:3]) < 0.01
    (masked,) = rows(explanation, "select_n")
    assert masked.figures.measured < 16
    assert masked.figures.error < 0.01


def test_zeros_beside_much_larger_numbers_are_said_where_nothing_of_the_norm_is_lost():
    """Gradients that vanish from layer to layer, stacked by a scan."""
    layers = np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32) * 0.006
    scanned = lambda layers, x: jax.lax.scan(
        lambda h, w: (jnp.tanh(h @ w + 0.5), None), x, layers
    )[0]
    gradient = jax.grad(
        lambda layers, x: jnp.sum(scanned(layers, x).astype(jnp.float32))
    )
    args = sc.as_scaled_array((jnp.asarray(layers), normal(4, 8)), dtype=HALF)
    actual, zeros = (
        sc.explain(gradient, *args),
        np.mean(sc.asarray(sc.scalify(gradient)(*args)) == 0),
    )
    assert zeros > 0.1
    assert actual.first_loss is None
    assert (
        f"; but zero in float16 beside much larger ones are {zeros:.1%} of the"
        " elements of" in str(actual)
    )


def test_what_a_program_prints_is_printed_once(capfd):
    def told(x):
        jax.debug.print("largest {x}", x=jnp.max(x))
        return x * 2

    assert explain(told, scaled(jnp.asarray([1.0, 3.0]))).errors == [0.0]
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest 3.0") == 1


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_the_errors_of_results_are_those_that_the_scaled_function_has(scales):
    ws, x = (
        scaled([normal(16, 16, seed=i) / 4 for i in range(3)]),
        normal(8, 16, seed=9),
    )
    size = 1e-7 if scales == "auto" else 1e-4
    grad = jax.grad(lambda ws: total(ws, x, size))
    explanation = sc.explain(grad, ws, scales=scales)
    actual = sc.asarray(sc.scalify(grad, scales=scales)(ws))
    expected = [
        error(a, [b]) for a, b in zip(actual, grad(sc.asarray(ws)), strict=True)
    ]
    # sums in another order round otherwise
    assert_allclose(explanation.errors, expected, rtol=0.02)
    if scales == "auto":
        assert explanation.first_loss is None
        assert max(explanation.errors) < 2.0**-9
        assert {r.dtype for r in explanation.rows} == {"float16", "float32"}


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_loops_branches_and_calls_are_followed_as_they_run(scales):
    """The turns of a scan are rows together, forward and backward."""
    ws, x = scaled(normal(4, 8, 8) / 3), scaled(normal(4, 8, seed=3))
    explanation = sc.explain(jax.grad(scan_loss), ws, x, scales=scales)
    assert explanation.first_loss is None
    # so the turns of both programs are in the same order
    assert max(explanation.errors) < (2.0**-9 if scales == "auto" else 0.01)
    assert [r.turns for r in rows(explanation, "dot_general")] == [4]
    assert {r.turns for r in rows(explanation, "dot_general", backward=True)} == {4}
    assert any(line.endswith(" layer") for line in str(explanation).splitlines())

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
        assert max(explanation.errors) < (2.0**-9 if scales == "auto" else 1e-3)


def counted(x):
    total = jax.new_ref(jnp.zeros(x.shape))

    def body(i, carry):
        total[...] += x @ x
        total[0] = total[1] * 2
        return carry

    lax.fori_loop(0, 3, body, 0)
    total[...] = total[...] * 1e-3
    return total[...]


@pytest.mark.parametrize("scales", ["auto", "static"])
def test_references_that_a_program_writes_to_are_followed(scales):
    x = scaled(normal(8, 8))
    explanation = sc.explain(counted, x, scales=scales)
    assert explanation.first_loss is None
    assert [row.turns for row in rows(explanation, "dot_general")] == [3]
    off = error(sc.scalify(counted, scales=scales)(x), counted(sc.asarray(x)))
    assert_allclose(explanation.errors, [off], atol=1e-6)


def test_a_reference_from_outside_is_written_to_once():
    log = jax.new_ref(jnp.zeros(4))

    def logged(x):
        log[...] += 1.0
        return x * log[...]

    assert sc.explain(logged, scaled(jnp.ones(4))).errors == [0.0]
    assert_array_equal(log[...], np.ones(4))


def test_what_cannot_be_explained_is_refused():
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
        return x * 2, positive.sum(), jnp.sum(positive, axis=0) + 1, product

    x = sc.as_scaled_array(draw_normal(0, (8, 8)), dtype=HALF)
    explanation = sc.explain(counts, x, scales=scales)
    assert [row.primitive for row in explanation.rows] == ["mul"]
