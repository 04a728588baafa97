"""The check mode: what a running program loses is warned of by the user's line, once a
call; without it, nothing."""

import contextlib
import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import error
from draws import draw_normal
from families import slow
from jax import lax
from numpy.testing import assert_array_equal

import scalify_core as sc


def normal(*shape, seed=0):
    return draw_normal(seed, shape)


def scaled(tree, scale=None):
    return sc.as_scaled_array(tree, scale, dtype=jnp.float16)


X, W = normal(8, 8), normal(8, 8, seed=1)


def vanishing(x, w):
    return jnp.exp(-jnp.abs(x) - 20.0) @ w  # exp gives scale 1, so FP16 zeros


LINE = inspect.getsourcelines(vanishing)[1] + 1


@contextlib.contextmanager
def reports():
    """The texts of what is warned of inside, after all callbacks have run."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        yield texts
        jax.effects_barrier()
    assert {w.category for w in actual} <= {sc.PrecisionWarning}
    texts += [str(w.message) for w in actual]
    assert all(w.filename == __file__ for w in actual)


def run(fun, *args):
    with reports() as texts:
        jax.block_until_ready(fun(*args))
    return texts


def checked(fun):
    return sc.scalify(fun, check=True, scales="static")


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_vanishes_is_named_once_in_each_call(transform):
    fun = transform(checked(vanishing))
    for _ in range(2):
        (text,) = run(fun, scaled(X), scaled(W))
        assert text.startswith(
            f"test_check_mode.py:{LINE} vanishing, dot_general: in float16 100.00% of"
            " its elements"
        )
    assert (
        run(transform(checked(lambda x, w: jnp.tanh(x @ w))), scaled(X), scaled(W))
        == []
    )


def test_what_saturates_is_named_at_the_equation_that_makes_it_however_deep():
    def grown(x):
        return jax.jit(jnp.exp)(x)

    (text,) = run(jax.jit(checked(grown)), scaled(jnp.asarray([10.5, 11.5, 12.5])))
    line = inspect.getsourcelines(grown)[1] + 1
    assert text.startswith(f"test_check_mode.py:{line} grown")
    assert "exp: in float16 66.67% of its elements saturate" in text


def test_sums_that_leave_fp16_in_a_product_are_named():
    ones = scaled(jnp.ones((256, 256)), 2.0**-6)  # data 64: terms that agree
    (text,) = run(jax.jit(checked(lambda a: a @ a)), ones)
    assert "dot_general: in float16" in text
    assert "saturate" in text


def test_both_passes_of_a_gradient_are_told_apart():
    def loss(x, w):
        return jnp.mean(jnp.tanh(x @ w)) * 1e-9

    inside = run(jax.jit(checked(jax.grad(loss))), scaled(X), scaled(W, 1.0))
    assert inside
    assert all("of the backward pass: in float16" in text for text in inside)


def scanned(x, w):
    return lax.scan(lambda h, _: (vanishing(h, w) * 2.0**29, None), x, None, length=4)[
        0
    ]


def conditional(x, w):
    return lax.cond(x[0, 0] > -100, vanishing, lambda x, w: x, x, w)


def mapped(x, w):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    spec = jax.sharding.PartitionSpec
    return jax.shard_map(
        vanishing, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d")
    )(x, w)


@pytest.mark.parametrize(
    "fun",
    [
        scanned,
        conditional,
        jax.checkpoint(vanishing),
        jax.grad(lambda x, w: jnp.sum(scanned(x, w))),
    ],
    ids=["scan", "cond", "remat", "grad of scan"],
)
def test_inside_control_flow_each_place_is_reported_once(fun):
    texts = run(jax.jit(checked(fun)), scaled(X), scaled(W))
    assert (
        len(
            [
                t
                for t in texts
                if t.startswith(f"test_check_mode.py:{LINE} vanishing, dot_general: ")
            ]
        )
        == 1
    )
    assert len(texts) == len(set(texts))


def test_each_device_of_a_shard_map_may_report():
    texts = run(jax.jit(checked(mapped)), scaled(X), scaled(W))
    assert 1 <= len([t for t in texts if f":{LINE} vanishing, dot_general: " in t]) <= 2


def test_under_vmap():
    fun = jax.jit(jax.vmap(checked(vanishing), in_axes=(0, None)))
    assert any(
        f":{LINE} vanishing" in text
        for text in run(fun, scaled(normal(3, 8, 8), 1.0), scaled(W))
    )


def test_a_library_function_that_is_traced_once_is_named_at_each_line_that_calls_it():
    def first(x):
        return jnp.convolve(jnp.exp(x - 30), W[0])

    def second(x):
        return jnp.convolve(jnp.exp(x - 31), W[0])

    actual = run(jax.jit(checked(lambda x: (first(x), second(x)))), scaled(X[0]))
    names = {text.split(",")[0].split()[1] for text in actual}
    assert names == {"first", "second"}


def test_casts_to_fp8_are_seen():
    def product(x, w):
        return sc.fp8_dot_general(x, w, (((1,), (0,)), ((), ())))

    w = scaled(normal(16, 16, seed=1))
    assert run(jax.jit(checked(product)), scaled(normal(16, 16)), w) == []
    (text,) = run(jax.jit(checked(product)), scaled(normal(16, 16), 2.0**12), w)
    assert "fp8_dot_general: in float8_e4m3fn" in text


def test_small_tails_and_masks_are_no_harm():
    def attention(q, k, v):
        logits = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), q @ k.T * 3, -1e9)
        return jax.checkpoint(jax.nn.softmax)(logits) @ v

    def gelu(x, w):
        return sc.fp8_dot_general(sc.functional.gelu(x), w, (((1,), (0,)), ((), ())))

    assert run(jax.jit(checked(attention)), scaled(X), scaled(W), scaled(X)) == []
    assert (
        run(
            jax.jit(checked(gelu)),
            scaled(normal(64, 64) * 2),
            scaled(normal(64, 64, seed=1)),
        )
        == []
    )
    tails = sc.ScaledArray(jnp.asarray([1.0, 1e-9, 1e-9, 1e-9], jnp.float16), 1.0)
    assert run(checked(lambda x: jnp.sum(x * 1.5)), tails) == []


@pytest.mark.parametrize("fun", [vanishing, scanned, conditional])
def test_measured_scales_have_nothing_to_report(fun):
    assert run(jax.jit(sc.scalify(fun, check=True)), scaled(X), scaled(W)) == []


def test_a_warning_can_be_made_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(sc.PrecisionWarning):
            checked(vanishing)(scaled(X), scaled(W))


def test_without_check_nothing_is_added_and_nothing_computed_otherwise():
    @functools.cache
    def texts(check):
        fun = sc.scalify(
            jax.grad(lambda x, w: jnp.sum(scanned(x, w))), check=check, scales="static"
        )
        return str(jax.make_jaxpr(fun)(scaled(X), scaled(W))), fun(scaled(X), scaled(W))

    with reports():
        plain, actual = texts(False)
        watched, expected = texts(True)
    assert "debug_callback" in watched
    assert "debug_callback" not in plain
    jax.tree.map(assert_array_equal, actual, expected)


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
    "contracted": (lambda x, w: (x * far(x).T) @ (w / far(w)), 1),
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


def causal(q, k, v, mask):
    return jax.nn.softmax(jnp.where(mask, q @ k.T / 2, -1e9)) @ v


def block(w, x, mask):
    h = x - x.mean(-1, keepdims=True)
    h = h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)
    x = x + causal(h @ w[0], h @ w[1], h @ w[2], mask)
    return x + jnp.tanh(x @ w[3])


CAUSAL = {
    "attention": lambda w, x, m: jnp.sum(causal(x @ w[0], x @ w[1], x @ w[2], m) ** 2),
    "in a jit": lambda w, x, m: jnp.sum(
        jax.jit(causal)(x @ w[0], x @ w[1], x @ w[2], m) ** 2
    ),
    "a mask that is added": lambda w, x, m: jnp.sum(
        (jax.nn.softmax(x @ w[0] @ x.T + jnp.where(m, 0, -1e9)) @ x) ** 2
    ),
    "two blocks": lambda w, x, m: jnp.sum(block(w, block(w, x, m), m) ** 2),
}


@pytest.mark.parametrize(
    ("kind", "size"),
    [("attention", 1.0), *(slow(kind, 3.0) for kind in CAUSAL)],
)
def test_the_last_keys_of_causal_attention_which_have_hardly_a_gradient_are_no_loss(
    kind, size
):
    args = scaled((size * normal(4, 16, 16, seed=3) / 4, size * normal(64, 16, seed=4)))
    mask = jnp.tril(jnp.ones((64, 64), bool))
    for gradient in (jax.grad(CAUSAL[kind], (0, 1)), CAUSAL[kind]):
        assert run(jax.jit(sc.scalify(gradient, check=True)), *args, mask) == []


RESIZED = {
    "divided": lambda h: h / far(h),
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
