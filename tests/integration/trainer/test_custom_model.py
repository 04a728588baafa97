"""A Flax NNX model of a program's own in the trainer: precision, roles, resumption,
refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import tiny_config
from flax import nnx
from walk import V, Walk

from trainer import CausalModel, Role, UserError, compose, train
from trainer.assembly.saved_model import restore_run
from trainer.model import Model
from trainer.models.custom import custom_spec
from trainer.models.flops import forward_flops_per_token, linear_sizes
from trainer.models.registry import family_of

D = 32


class Next(CausalModel):
    """Two layers of `build`, one parameter of its own making."""

    def __init__(self, build):
        make = build.scope("h.0")
        self.table = build.table(build.vocab_size, D)
        self.shift = nnx.Param(jnp.zeros(D), role=Role("bias"))
        self.norm = make.layer_norm(D)
        self.up = make.linear("up", D, 4 * D, 0.1, "column")
        self.down = make.linear("down", 4 * D, build.vocab_size, 0.1, "row")

    def __call__(self, tokens):
        rows = self.table.embedding[...][tokens.reshape(-1)]
        x = rows.astype(jnp.float32) + self.shift[None]
        return self.down(jax.nn.relu(self.up(self.norm(x)))).reshape(*tokens.shape, -1)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configuration(*overrides):
    return tiny_config("optimizer.lr=1e-2", *overrides)


@pytest.mark.slow  # its steps in FP32: test_a_run_goes_on_with_the_same_model
def test_it_learns_in_fp8_and_its_layers_have_figures():
    keys = ["precision=scalify_fp8_fp16", "train.steps=40", "metrics.numerics_every=40"]
    last = train(configuration(*keys), model=Next, data=Walk()).rows[-1]
    assert last["val/loss"] < 0.5 * np.log(V)
    weights = [name.split("/")[2] for name in last if "numerics/weights/" in name]
    assert {"up.kernel", "down.kernel", "table.embedding", "shift"} <= set(weights)


def test_a_pattern_of_the_precision_chooses_its_layers():
    spec = custom_spec(Next, vocab_size=V, context=8, keep_fp8_weights=False)
    policy = compose(
        ["precision=fp8_current", "precision.exclude=[h.0.down]"]
    ).precision.policy
    assert Model.make(spec, policy, rows=32).narrow == ["h.0.up"]
    sizes = {"h.0.up": (D, 4 * D), "h.0.down": (4 * D, V)}
    assert linear_sizes(spec) == sizes
    flops = 2 * (4 * D * D + 4 * D * V + V * D)
    assert forward_flops_per_token(spec) == flops


def test_its_cacheless_decoding_gives_the_logits_of_the_whole():
    spec = custom_spec(Next, vocab_size=V, context=8, keep_fp8_weights=False)
    model = family_of(spec).build(spec)
    bound = model.bind(model.init(jax.random.key(0)))
    tokens = jnp.arange(8, dtype=jnp.int32)[None] * 3
    expected, cache = bound(tokens), bound.init_cache(1)
    for i, j in ((0, 5), (5, 6), (6, 7), (7, 8)):
        h, cache = bound.decode(tokens[:, i:j], cache, i)
        np.testing.assert_array_equal(bound.logits(h[0]), expected[0, i:j])


def test_a_run_goes_on_with_the_same_model_and_with_no_other():
    config = configuration("train.steps=4")
    first = train(config, model=Next, data=Walk())

    class Wider(Next):
        def __init__(self, build):
            super().__init__(build)
            self.more = nnx.Param(jnp.zeros(D), role=Role("bias"))

    fork = configuration("run_dir=B", "resume.source=A", "train.steps=6")
    with pytest.raises(UserError, match="resume=A has parameters="):
        train(fork, model=Wider, data=Walk())
    with pytest.raises(UserError, match="resume=A has a own, the model is a gpt2"):
        train(fork, data=Walk())
    message = "A was trained by a program with a model of its own"
    with pytest.raises(UserError, match=message):
        restore_run(first.run_dir)
    more = train(configuration("train.steps=6"), model=Next, data=Walk())
    assert [row["step"] for row in more.rows] == [1, 2, 3, 4, 5, 6]
    assert more.rows[:4] == first.rows


class Nameless(Next):
    def __init__(self, build):
        super().__init__(build)
        self.extra = nnx.Param(jnp.zeros(D))


class Flat(Next):
    def __call__(self, tokens):
        return super().__call__(tokens)[..., :5]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Nameless, "parameter extra has no role"),
        (Flat, r"model gives \[2, 32, 5\] for tokens \[2, 32\]; expected logits \[2,"),
        (
            lambda build: nnx.Linear(2, 2, rngs=build.rngs),
            "model gave a Linear; expected a trainer.CausalModel",
        ),
    ],
)
def test_what_is_no_model_is_a_user_error(model, message):
    with pytest.raises(UserError, match=message):
        train(configuration(), model=model, data=Walk())
