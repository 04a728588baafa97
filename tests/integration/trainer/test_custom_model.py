"""A Flax NNX model of a program's own in the trainer: precision, roles, resumption,
refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import CACHE, TINY
from flax import nnx

from trainer import CausalModel, Role, UserError, compose, train
from trainer.assembly.saved_model import restore_run
from trainer.model import Model
from trainer.models.custom import custom_spec
from trainer.models.registry import family_of

SMALL = [*TINY, "parallel.data=1", "sample.max_new_tokens=4", CACHE]
B, T, V, D = 16, 33, 64, 32


class Walk:
    vocab_size = V

    def __init__(self):
        self.validation = [self.batch(10**6)]

    def batch(self, step):
        rng = np.random.default_rng(step)
        return (
            rng.integers(V, size=(B, 1)) + rng.integers(1, 3, size=(B, T)).cumsum(1)
        ) % V


class Next(CausalModel):
    """Two layers of `build`, one parameter of its own making."""

    def __init__(self, build):
        make = build.at("h.0")
        self.table = build.table(build.vocab_size, D)
        self.shift = nnx.Param(jnp.zeros(D), role=Role("bias"))
        self.norm, self.up = (
            make.layer_norm(D),
            make.linear("up", D, 4 * D, 0.1, "column"),
        )
        self.down = make.linear("down", 4 * D, build.vocab_size, 0.1, "row")

    def __call__(self, tokens):
        x = (
            self.table.embedding[...][tokens.reshape(-1)].astype(jnp.float32)
            + self.shift[None]
        )
        return self.down(jax.nn.relu(self.up(self.norm(x)))).reshape(*tokens.shape, -1)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configuration(*overrides):
    return compose(
        [*SMALL, "run_dir=A", "tracker=jsonl", "optimizer.lr=1e-2", *overrides]
    )


@pytest.mark.slow  # its steps in FP32: test_a_run_goes_on_with_the_same_model
@pytest.mark.parametrize("precision", ["scalify_fp8_fp16", "fp8_current"])
def test_it_learns_in_any_precision_and_narrow_products_are_those_of_the_pattern(
    precision,
):
    actual = train(
        configuration(
            f"precision={precision}", "train.steps=40", "metrics.numerics_every=40"
        ),
        model=Next,
        data=Walk(),
    )
    assert actual.rows[-1]["val/loss"] < 0.5 * np.log(V)
    assert set(actual.state.params) == {"table", "shift", "norm", "up", "down"}
    names = {
        name.split("/")[2]
        for name in actual.rows[-1]
        if name.startswith("numerics/weights/")
    }
    assert {"up.kernel", "down.kernel", "table.embedding", "shift"} <= names


def test_a_pattern_of_the_precision_chooses_its_layers():
    spec = custom_spec(Next, vocab_size=V, context=8, keep_fp8_weights=False)
    policy = compose(
        ["precision=fp8_current", "precision.exclude=[h.0.down]"]
    ).precision.policy
    model = Model.make(spec, policy, rows=32)
    assert model.narrow == ["h.0.up"]
    assert family_of(spec).linear_sizes(spec) == {
        "h.0.up": (D, 4 * D),
        "h.0.down": (4 * D, V),
    }
    assert family_of(spec).forward_flops_per_token(spec) == 2 * (
        4 * D * D + 4 * D * V + V * D
    )


def test_its_cacheless_decoding_gives_the_logits_of_the_whole():
    spec = custom_spec(Next, vocab_size=V, context=8, keep_fp8_weights=False)
    model = family_of(spec).build(spec)
    bound = model.bind(model.init(jax.random.key(0)))
    tokens = jnp.arange(8, dtype=jnp.int32)[None] * 3
    whole = bound(tokens)
    h, cache = bound.decode(tokens[:, :5], bound.init_cache(1), 0)
    np.testing.assert_array_equal(bound.logits(h[0]), whole[0, :5])
    for i in range(5, 8):
        h, cache = bound.decode(tokens[:, i : i + 1], cache, i)
        np.testing.assert_array_equal(bound.logits(h[0]), whole[0, i : i + 1])


def test_a_run_goes_on_with_the_same_model_and_with_no_other():
    config = configuration("train.steps=4")
    first = train(config, model=Next, data=Walk())

    class Wider(Next):
        def __init__(self, build):
            super().__init__(build)
            self.more = nnx.Param(jnp.zeros(D), role=Role("bias"))

    with pytest.raises(UserError, match="resume=A has parameters="):
        train(
            configuration("run_dir=B", "resume.source=A", "train.steps=6"),
            model=Wider,
            data=Walk(),
        )
    with pytest.raises(UserError, match="resume=A has a own, the model is a gpt2"):
        train(
            configuration("run_dir=B", "resume.source=A", "train.steps=6"), data=Walk()
        )
    with pytest.raises(
        UserError, match="A was trained by a program with a model of its own"
    ):
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
    ("model", "said"),
    [
        (Nameless, "parameter extra has no role"),
        (
            Flat,
            (
                r"model gives \[2, 32, 5\] for tokens \[2, 32\]; expected logits \[2,"
                r" 32, 64\]"
            ),
        ),
        (
            lambda build: nnx.Linear(2, 2, rngs=build.rngs),
            "model gave a Linear; expected a trainer.CausalModel",
        ),
    ],
)
def test_what_is_no_model_is_a_user_error(model, said):
    with pytest.raises(UserError, match=said):
        train(configuration(), model=model, data=Walk())


def test_a_mesh_that_cannot_split_it_is_a_user_error():
    with pytest.raises(UserError, match="tensor=2: a custom model cannot be split"):
        train(configuration("parallel.tensor=2"), model=Next, data=Walk())
