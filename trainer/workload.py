"""What is trained, on what, and the functions that follow from that alone: the state, the compiled step, samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from trainer.data import Loader, Manifest, Tokenizer
from trainer.generate import Generator
from trainer.model import GPT2, GPT2Spec, Params, param_count
from trainer.parallel import replicated
from trainer.state import TrainState, init_state
from trainer.step import Hyper, Tokens, make_train_step
from trainer.watchdog import first_nonfinite


class Model(NamedTuple):
    """A GPT-2 as pure functions: `init(key)` gives parameters, `bind(params)` the model that has them."""

    spec: GPT2Spec
    init: Callable[[jax.Array], Params]
    bind: Callable[[Params], GPT2]

    def loss(self, params: Params, tokens: jax.Array, segments: jax.Array | None, key: jax.Array | None) -> jax.Array:
        """Mean next-token loss of `tokens` [B, T+1] in nats; dropout with `key`, none without."""
        segments = None if segments is None else segments[:, :-1]
        dropout_key = key if self.spec.dropout else None
        return self.bind(params).loss(tokens[:, :-1], tokens[:, 1:], segments, dropout_key)


class Dataset(NamedTuple):
    """Loaders of both parts of a prepared directory, and their tokenizer."""

    train: Loader
    val: Loader
    tokenizer: Tokenizer
    directory: Path

    @classmethod
    def open(cls, directory: Path, *, seed: int, **settings: Any) -> Self:
        """Open both parts; `settings` are those of `Loader`. Training reads a permutation, validation the order."""
        train = Loader(directory, "train", seed=seed, shuffle=True, **settings)
        val = Loader(directory, "val", seed=seed, shuffle=False, **settings)
        return cls(train, val, train.manifest.get_tokenizer(), directory)

    @property
    def manifest(self) -> Manifest:
        """What the directory holds."""
        return self.train.manifest

    @property
    def bytes_per_token(self) -> float:
        """Of the validation part's text."""
        return self.manifest.bytes("val") / self.manifest.tokens("val")


class Workload(NamedTuple):
    """What is trained, on what: everything but the run directory."""

    model: Model
    data: Dataset
    optimizer: optax.GradientTransformation
    mesh: Mesh

    @property
    def parameters(self) -> int:
        """Without the vocabulary's padding rows."""
        return param_count(self.model.spec)


class Trained(NamedTuple):
    """A run's model as it was saved: parameters on the first device."""

    spec: GPT2Spec
    bind: Callable[[Params], GPT2]
    params: Params
    tokenizer: Tokenizer


def make_init(w: Workload, seed: int) -> Callable[[], TrainState]:
    """The compiled function that makes the first state, replicated over the mesh, from the seed alone."""

    def init() -> TrainState:
        init_key, step_key = jax.random.split(jax.random.key(seed))
        return init_state(w.model.init(init_key), w.optimizer, step_key)

    return jax.jit(init, out_shardings=replicated(w.mesh))


def abstract_state(w: Workload, seed: int) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated."""
    sharding = replicated(w.mesh)
    shapes = jax.eval_shape(make_init(w, seed))
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)


def compile_step(w: Workload, seed: int, batch: Tokens) -> jax.stages.Compiled:
    """The train step for batches like `batch`, compiled once for the whole run; the state is donated."""
    step = make_train_step(w.model.loss, w.optimizer)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=replicated(w.mesh))
    lr: Any = jax.ShapeDtypeStruct((), np.float32)
    number: Any = jax.ShapeDtypeStruct((), np.int32)
    return jitted.lower(abstract_state(w, seed), batch, Hyper(lr, number)).compile()


def make_sample(w: Workload, prompt: str, **controls: Any) -> Callable[[Any], str]:
    """`params -> text`: the prompt and its continuation; `controls` are those of `Generator`."""
    generator = Generator(w.model.bind, w.model.spec)
    ids = w.data.tokenizer.encode(prompt)

    def sample(params: Any) -> str:
        local = jax.tree.map(lambda x: x.addressable_data(0), params)
        return prompt + w.data.tokenizer.decode(generator(local, ids, **controls))

    return sample


def make_diagnose(w: Workload) -> Callable[[TrainState, Tokens, int], str]:
    """`(state, batch, step) -> text`: the first tensor of the loss or its gradient that is not finite on that batch."""

    def gradient(params: Any, tokens: jax.Array, segments: jax.Array | None, key: jax.Array) -> Any:
        return jax.value_and_grad(w.model.loss)(params, tokens, segments, key)

    def diagnose(state: TrainState, batch: Tokens, step: int) -> str:
        if jax.process_count() > 1:
            return "several processes: run the batch in skipped/ on one to find the first bad tensor"
        key = jax.random.fold_in(state.key, step)
        for i in range(batch.tokens_AxBxT1.shape[0]):
            segments = None if batch.segments_AxBxT1 is None else batch.segments_AxBxT1[i]
            micro_key = jax.random.fold_in(key, i)
            found = first_nonfinite(gradient, state.params, batch.tokens_AxBxT1[i], segments, micro_key)
            if found is not None:
                return f"micro-batch {i}: {found}"
        return "the batch gives finite values with the parameters as they are now"

    return diagnose
