"""What the formats do to a run's tensors: scale, RMS, underflow and saturation of every
layer, as figures of a row.

They come from a second compiled function of state and batch, which differentiates the
model with probes around its layers; the train step knows nothing of it. A row has
`numerics/CLASS/LAYER/FIGURE`:

  CLASS   weights, activations, activation_gradients, weight_gradients (as the optimizer
          gets them), mu, nu (as stored: `nu` as its root where it is narrow)
  LAYER   a parameter, such as `h.3.mlp.c_fc.kernel` of GPT-2; or the input or output of
          a layer, `h.3.mlp.c_fc.in`, `h.3.ln_2.out`. The residual stream is `h.3.in`,
          before a block, and the input of the last norm.
  FIGURE  exponent (log2 of the scale), rms (of the data), underflow, saturated (shares
  of the elements)

What underflow is counted against, where a zero does not tell whether it came from a
zero:

- Operands of narrow matmuls (weights, inputs, gradients of outputs): the cast to come.
  Exact, except where something comes between: what `clip_outliers` clips is not counted
  as clipped, and of `model.mlp=smooth_swiglu` the last kernel is counted before its
  rows are multiplied by the channels' sizes.
- Weight gradients that were cast: the values before the cast. Exact.
- First moments: a zero whose second moment is not zero was lost. Exact, where the
  optimizer has both.
- Other stored tensors: the share of subnormal numbers, zeros left out. Biases begin as
  zeros, rows of an embedding that were never seen keep moments of zero, and a second
  moment is never stored as zero unless it is (`scalify_core.optim`).
- All else: numbers that are zero or subnormal in the tensor's own format. An upper
  bound, since gradients of rows that were not seen and what dropout left out count too.
  The same holds for operands under `scaling=delayed` and `current`, which cast to FP8
  with a scale that the tensor does not have.

Saturation is counted against the cast to come, or the format that the tensor has.

With them come `sharpness/logits` and `sharpness/critical`; see `sharpness`.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalify_core import FloatFormat, tree
from scalify_core.array import is_scaled_array, with_scale
from scalify_core.probe import FIGURES, SLOT, figures, probe
from trainer.observe.sharpness import make_sharpness
from trainer.parallel.mesh import replicated
from trainer.precision.policy import Policy
from trainer.step.optimizers import ENTRIES, KEYS
from trainer.step.state import TrainState
from trainer.step.step import Tokens, sequence_keys
from trainer.workload import Model, TrainTask

CLASSES = (
    "weights",
    "activations",
    "activation_gradients",
    "weight_gradients",
    "mu",
    "nu",
)
SIDES = ("in", "out")

# by layer: `h.3.ln_2.out`; of stacked blocks `h.ln_2.out`, with a leading axis L
Slots = dict[str, jax.Array]


class Slot(nnx.Variable):
    """The second argument of a probe."""


class Probe(nnx.Module):
    """A probe with its slot, and the formats that its array and the gradient are cast
    to next.
    """

    def __init__(
        self, slot: jax.Array, forward: FloatFormat | None, backward: FloatFormat | None
    ) -> None:
        self.slot = Slot(slot)
        self.forward, self.backward = forward, backward

    def __call__(self, x: jax.Array) -> jax.Array:
        return probe(x, self.slot[...], forward=self.forward, backward=self.backward)


class Probed(nnx.Module):
    """A module with probes before and behind it."""

    def __init__(self, module: Any, probes: dict[str, Probe]) -> None:
        self.module = module
        self.before, self.behind = probes.get("in"), probes.get("out")

    def __call__(self, x: jax.Array, *args: Any, **settings: Any) -> jax.Array:
        y = self.module(x if self.before is None else self.before(x), *args, **settings)
        return y if self.behind is None else self.behind(y)

    @property
    def bias(self) -> Any:
        """The module's, for who adds it himself."""
        return self.module.bias


def probed_layers(
    model: nnx.Module,
) -> Iterator[tuple[str, Any, tuple[Any, ...], tuple[str, ...]]]:
    """Name, module, path and sides of every layer that says which of its sides are
    probed; the innermost first.
    """
    for path, module in sorted(nnx.iter_modules(model), key=lambda item: -len(item[0])):
        sides = getattr(module, "probes", ())
        if sides:
            yield ".".join(map(str, path)), module, path, sides


def is_stack(model: Model, name: str) -> bool:
    """Return whether a parameter or layer is a stack of all blocks'."""
    return model.spec.scan_layers and name.split(".")[0] == model.family.blocks


def make_slots(model: Model) -> Slots:
    """A slot for every probe: zeros."""
    init, bind, init_histories, _ = model.training
    abstract = nnx.eval_shape(lambda: bind(init(jax.random.key(0)), init_histories()))
    return {
        f"{name}.{side}": jnp.zeros(
            ((model.spec.n_layer, *SLOT) if is_stack(model, name) else SLOT),
            jnp.float32,
        )
        for name, _, _, sides in probed_layers(abstract)
        for side in sides
    }


def casts(policy: Policy, path: str) -> tuple[FloatFormat | None, FloatFormat | None]:
    """What the chosen matmul at `path` casts operands and its result's gradient to,
    with the tensors' own scales.
    """
    backward = policy.backward_of(path)
    if policy.forward is None or backward is None or policy.method.in_products:
        return None, None
    return FloatFormat.parse(policy.forward), FloatFormat.parse(backward)


def operand_formats(
    model: Model, name: str, side: str
) -> tuple[FloatFormat | None, FloatFormat | None]:
    """What a layer's input or output is cast to next, and its gradient."""
    path = name.replace(".", ".*.", 1) if is_stack(model, name) else name
    if path not in model.narrow:
        return None, None
    forward, backward = casts(model.policy, path)
    return (forward, None) if side == "in" else (None, backward)


def attach(model: Model, bound: Any, slots: Slots) -> Any:
    """The bound model with a probe at every slot."""
    for name, module, path, sides in list(probed_layers(bound)):
        probes = {
            side: Probe(slots[f"{name}.{side}"], *operand_formats(model, name, side))
            for side in sides
        }
        *parents, last = path
        parent: Any = bound
        for key in parents:
            parent = parent[key] if isinstance(key, int) else getattr(parent, key)
        if isinstance(last, int):
            parent[last] = Probed(module, probes)
        else:
            setattr(parent, last, Probed(module, probes))
    return bound


def gradients(
    model: Model, state: TrainState, batch: Tokens, step: jax.Array
) -> tuple[Any, Slots]:
    """The gradients of the first micro-batch, as the step number `step` differentiates
    it, and the filled slots.
    """
    method, keys_B = (
        model.policy.method,
        sequence_keys(jax.random.fold_in(state.key, step), batch)[0],
    )

    def pull(
        params: Any,
        slots: Slots,
        tokens: jax.Array,
        segments: jax.Array | None,
        keys_B: jax.Array,
    ) -> Any:
        def loss(params: Any, slots: Slots) -> jax.Array:
            training = model.training._replace(
                bind=lambda *arguments: attach(
                    model, model.training.bind(*arguments), slots
                )
            )
            own = method.arguments(state.scaling)
            return model._replace(training=training).loss(
                params, tokens, segments, keys_B, **own
            )

        return jax.vjp(loss, params, slots)[1](
            jnp.asarray(method.factor(state.scaling))
        )

    first: Tokens = jax.tree.map(lambda x: x[0], batch)
    grads, seen = method.through(pull, model.policy)(
        state.params, make_slots(model), *first, keys_B
    )
    return method.unscaled(grads, state.scaling), seen


def named(tree: Any, field: str | None = None) -> dict[str, Any]:
    """The floating-point arrays of a tree of parameters by name; of an optimizer's
    state, those of a field.
    """
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled_array):
        if field is not None:
            at = [
                i for i, key in enumerate(path) if getattr(key, "name", None) == field
            ]
            if not at:
                continue
            path = path[at[0] + 1 :]
        found[jax.tree_util.keystr(path, simple=True, separator=".")] = x
    return found


def fields_of(state: Any, optimizer: str, key: str) -> dict[str, Any]:
    """The moments of the named optimizer's state that `precision.KEY` stores, by the
    names of their parameters.
    """
    found: dict[str, Any] = {}
    for moment in ENTRIES[optimizer].moments:
        found |= named(state, moment.field) if moment.key == key else {}
    return found


def stored_gradients(
    task: TrainTask, state: TrainState, batch: Tokens, step: jax.Array
) -> tuple[Any, dict[str, Any], Slots]:
    """The gradients as the optimizer gets them; by name those before the cast where
    there is one; the filled slots.
    """
    model = task.model
    grads, seen = gradients(model, state, batch, step)
    grads = task.trained(grads)
    stored, exact = model.store_gradients(grads), named(grads)
    dtypes = {name: g.dtype for name, g in named(stored).items()}
    return stored, {n: g for n, g in exact.items() if g.dtype != dtypes[n]}, seen


def of_tensor(
    data: jax.Array,
    scale: Any,
    exact: jax.Array | None,
    settings: tuple[FloatFormat | None, bool, bool],
) -> jax.Array:
    """The figures of a stored tensor: [4], or [L, 4] of a stack of all layers'.

    Args:
      data, scale: of it; 1 for a plain array.
      exact: as of `probe.figures`, and so are the first two of
      settings: the cast to come; whether zeros count; whether it is a stack.
    """
    fmt, zeros, stacked = settings
    of = functools.partial(figures, zeros=zeros)
    if not stacked:
        return of(with_scale(data, scale), fmt, exact)
    scale = jnp.broadcast_to(jnp.reshape(scale, -1), data.shape[:1])
    if exact is None:
        return jax.vmap(lambda data, scale: of(with_scale(data, scale), fmt))(
            data, scale
        )
    return jax.vmap(
        lambda data, scale, exact: of(with_scale(data, scale), None, exact)
    )(data, scale, exact)


def by_layer(
    model: Model, layers: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and figures [4] of every layer, stacks taken apart, in the order of a
    forward pass.
    """
    single: dict[str, np.ndarray] = {}
    for name, values in layers.items():
        if is_stack(model, name):
            blocks, _, rest = name.partition(".")
            single |= {f"{blocks}.{i}.{rest}": row for i, row in enumerate(values)}
        else:
            single[name] = values
    place = {
        part: i for i, part in enumerate((SIDES[0], *model.family.parts, SIDES[1]))
    }
    yield from sorted(single.items(), key=lambda item: order(item[0], place))


def order(name: str, place: Mapping[str, int]) -> list[int]:
    """Where a layer or parameter stands among its like: blocks by number, parts by
    `place`, others behind them.
    """
    return [
        int(part) if part.isdigit() else place.get(part, len(place))
        for part in name.split(".")
    ]


def make_numerics(
    task: TrainTask, lr: float
) -> Callable[[TrainState, Tokens, int], dict[str, float]]:
    """`(state, batch, step) -> row`: the figures of a state on a batch; `step` is the
    number that dropout gets.

    Compiled at the first call, and again when static scales have changed. The state is
    not donated. Tensors that are there anyway are measured one by one, by a small
    program for each shape: in one with the gradients, as many reductions as all tensors
    need take longer to compile than the train step.

    `lr`: as of `make_sharpness`.
    """
    model, optimizer = task.model, task.optimizer_name
    sharpness = make_sharpness(task, lr)
    jit = functools.partial(task.jit, out_shardings=replicated(task.mesh))
    pull = jit(functools.partial(stored_gradients, task))
    measure = jit(of_tensor, static_argnums=3)
    everywhere = jit(lambda params: params)
    forward, _ = casts(model.policy, "")
    kernels = {
        name for name, role in named(model.roles).items() if model.is_narrow(role)
    }

    def of(
        tensors: dict[str, Any],
        exact: dict[str, Any],
        cast: Collection[str] = (),
        *,
        zeros: bool,
    ) -> Slots:
        found = {}
        for name, x in tensors.items():
            data, scale = (x.data, x.scale) if is_scaled_array(x) else (x, 1.0)
            before: Any = exact.get(name)
            if is_scaled_array(before):
                before = before.data
            settings = (forward if name in cast else None, zeros, is_stack(model, name))
            # One after the other: programs of several devices that are there at once
            # can wait for each other forever.
            found[name] = jax.block_until_ready(
                measure(data, jnp.asarray(scale, jnp.float32), before, settings)
            )
        return found

    def numerics(split: TrainState, batch: Tokens, step: int) -> dict[str, float]:
        state = dataclasses.replace(split, params=everywhere(split.params))
        moments = tree.unpack(state.opt_state)
        mu, nu = (fields_of(moments, optimizer, key) for key in KEYS)
        narrow = {
            name: nu[name] for name in mu if is_scaled_array(mu[name]) and name in nu
        }
        grads, exact, seen = pull(state, batch, np.int32(step))
        found = {
            "weights": of(named(state.params), {}, kernels, zeros=False),
            "activations": {name: both[..., 0, :] for name, both in seen.items()},
            "activation_gradients": {
                name: both[..., 1, :] for name, both in seen.items()
            },
            "weight_gradients": of(named(grads), exact, zeros=True),
            "mu": of(mu, narrow, zeros=False),
            "nu": of(nu, {}, zeros=False),
        }
        found = jax.device_get(found)
        sharp = {
            name: float(f"{x:.6g}")
            for name, x in sharpness(split, grads, batch, step).items()
        }
        return sharp | {
            f"numerics/{kind}/{layer}/{figure}": float(f"{value:.6g}")
            for kind in CLASSES
            for layer, row in by_layer(model, found[kind])
            for figure, value in zip(FIGURES, row.tolist(), strict=True)
        }

    return numerics
