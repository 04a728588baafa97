"""Numerics of a run: scale, RMS, underflow and saturation of every layer.

A second compiled function of state and batch measures them: it differentiates the model
with probes around its layers. The train step itself is unchanged. A row has
`numerics/CLASS/LAYER/FIGURE`:

  CLASS   weights, activations, activation_gradients, weight_gradients (as the optimizer
          gets them), mu, nu (as stored: a narrow `nu` as its square root)
  LAYER   a parameter, such as `h.3.mlp.c_fc.kernel` of GPT-2; or the input or output of
          a layer, `h.3.mlp.c_fc.in`, `h.3.ln_2.out`. The residual stream is `h.3.in`,
          before a block, and the input of the last norm.
  FIGURE  exponent (log2 of the scale), rms (of the data), underflow, saturated (shares
          of the elements)

A stored zero does not tell whether it was rounded to zero. So underflow is counted by
class:

- Operands of narrow matmuls (weights, inputs, gradients of outputs): against the cast
  to come. This is exact, with two exceptions. Values that `clip_outliers` clips are not
  counted as clipped. With `model.mlp=smooth_swiglu` the last kernel is measured before
  its rows are multiplied by the channels' sizes.
- Weight gradients that were cast: against the values before the cast. Exact.
- First moments: a zero whose second moment is not zero. Exact, where the optimizer has
  both moments.
- Other stored tensors: the share of subnormal numbers, without zeros. Biases start as
  zeros, unseen rows of an embedding keep zero moments, and a second moment is never
  stored as zero unless it is zero (`scalify_core.optim`).
- All else: zeros and subnormals of the tensor's own format. This is an upper bound,
  because gradients of unseen rows and dropped values count too. The same holds for
  operands under `scaling=delayed` and `current`, which cast to FP8 with a scale that
  the tensor does not have.

Saturation is counted against the cast to come, or else the tensor's own format.

On request the row also has `sharpness/logits` and `sharpness/critical`; see
`sharpness`.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalify_core import tree
from scalify_core.array.scaled_array import is_scaled_array, with_scale
from scalify_core.debug.stats import FIGURES, SLOT, figures, probe
from scalify_core.numerics.formats import FloatFormat
from trainer.observe.sharpness import Sharpness
from trainer.parallel.mesh import replicated
from trainer.precision.policy import Policy
from trainer.step.optimizers import MOMENT_KEYS, OPTIMIZERS
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
    """The second argument of a probe, whose gradient is the measurement."""


class Probe(nnx.Module):
    """A probe with its slot, and the formats of the casts that follow."""

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
        self.input_probe, self.output_probe = probes.get("in"), probes.get("out")

    def __call__(self, x: jax.Array, *args: Any, **settings: Any) -> jax.Array:
        if self.input_probe is not None:
            x = self.input_probe(x)
        y = self.module(x, *args, **settings)
        return y if self.output_probe is None else self.output_probe(y)

    @property
    def bias(self) -> Any:
        """The module's bias, for a caller that adds it itself."""
        return self.module.bias


def probed_layers(
    model: nnx.Module,
) -> Iterator[tuple[str, Any, tuple[Any, ...], tuple[str, ...]]]:
    """Yield name, module, path and probed sides of every layer, the innermost first."""
    for path, module in sorted(nnx.iter_modules(model), key=lambda item: -len(item[0])):
        sides = getattr(module, "probes", ())
        if sides:
            yield ".".join(map(str, path)), module, path, sides


def is_stack(model: Model, name: str) -> bool:
    """Return whether a parameter or layer is stacked over all blocks."""
    return model.spec.scan_layers and name.split(".")[0] == model.family.blocks_name


def make_slots(model: Model) -> Slots:
    """Return zeros for the slot of every probe."""
    init, bind, init_histories, _ = model.training
    abstract = nnx.eval_shape(lambda: bind(init(jax.random.key(0)), init_histories()))
    slots = {}
    for name, _, _, sides in probed_layers(abstract):
        shape = (model.spec.n_layer, *SLOT) if is_stack(model, name) else SLOT
        for side in sides:
            slots[f"{name}.{side}"] = jnp.zeros(shape, jnp.float32)
    return slots


def casts(policy: Policy, path: str) -> tuple[FloatFormat | None, FloatFormat | None]:
    """Return the formats of operands and of the output gradient of a narrow matmul.

    They are None where the tensors' own scales are not used for the cast.
    """
    backward = policy.backward_of(path)
    if policy.forward is None or backward is None or policy.method.in_products:
        return None, None
    return FloatFormat.parse(policy.forward), FloatFormat.parse(backward)


def operand_formats(
    model: Model, name: str, side: str
) -> tuple[FloatFormat | None, FloatFormat | None]:
    """Return the formats of the next casts of an input or output and its gradient."""
    path = name.replace(".", ".*.", 1) if is_stack(model, name) else name
    if path not in model.narrow:
        return None, None
    forward, backward = casts(model.policy, path)
    return (forward, None) if side == "in" else (None, backward)


def format_name(model: Model, kind: str, layer: str) -> str:
    """Return the format of a tensor of a row: that of the cast to come, or its own.

    Args:
      model: in its precision.
      kind: the class of the tensor, one of `CLASSES`.
      layer: its parameter, or input or output, as in a row's `numerics/CLASS/LAYER`.
    """
    policy = model.policy
    if kind in MOMENT_KEYS:
        return str(getattr(policy, kind))
    if is_stack(model, layer):
        blocks, _, *rest = layer.split(".")
        layer = ".".join([blocks, *rest])
    path, _, last = layer.rpartition(".")
    if last in SIDES:
        forward, backward = operand_formats(model, path, last)
        is_cast = (forward if kind == "activations" else backward) is not None
        stored_format = policy.compute
    else:
        stored_format = policy.weights
        is_narrow = model.is_narrow(named(model.roles).get(layer))
        is_cast = is_narrow and policy.forward is not None
        if kind == "weights":
            is_cast = is_narrow and casts(policy, "")[0] is not None
    cast = {
        "weights": policy.forward,
        "activations": policy.forward,
        "activation_gradients": policy.backward,
        "weight_gradients": policy.weight_grad,
    }
    return str(cast[kind] if is_cast else stored_format)


def attach(model: Model, bound: Any, slots: Slots) -> Any:
    """Put a probe at every slot of the bound model, and return the model."""
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
    """Return gradients of the first micro-batch, and the filled slots.

    `step` is the step's number, which dropout depends on.
    """
    method = model.policy.method
    keys_B = sequence_keys(jax.random.fold_in(state.key, step), batch)[0]

    def pull(
        params: Any,
        slots: Slots,
        tokens: jax.Array,
        segments: jax.Array | None,
        keys_B: jax.Array,
    ) -> Any:
        def loss(params: Any, slots: Slots) -> jax.Array:
            def bind_probed(*arguments: Any) -> Any:
                return attach(model, model.training.bind(*arguments), slots)

            training = model.training._replace(bind=bind_probed)
            return model._replace(training=training).loss(
                params, tokens, segments, keys_B, **method.arguments(state.scaling)
            )

        factor = jnp.asarray(method.factor(state.scaling))
        return jax.vjp(loss, params, slots)[1](factor)

    first: Tokens = jax.tree.map(lambda x: x[0], batch)
    grads, seen = method.through(pull, model.policy)(
        state.params, make_slots(model), *first, keys_B
    )
    return method.unscaled(grads, state.scaling), seen


def named(tree: Any, field: str | None = None) -> dict[str, Any]:
    """Return the floating-point arrays of a tree by parameter name.

    `field`: of an optimizer's state, only the arrays below the field of this name.
    """
    arrays = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled_array):
        if field is not None:
            at = [
                i for i, key in enumerate(path) if getattr(key, "name", None) == field
            ]
            if not at:
                continue
            path = path[at[0] + 1 :]
        arrays[jax.tree_util.keystr(path, simple=True, separator=".")] = x
    return arrays


def fields_of(state: Any, optimizer: str, key: str) -> dict[str, Any]:
    """Return the moments that `precision.KEY` stores, by parameter name."""
    moments: dict[str, Any] = {}
    for moment in OPTIMIZERS[optimizer].moments:
        if moment.key == key:
            moments |= named(state, moment.field)
    return moments


def stored_gradients(
    task: TrainTask, state: TrainState, batch: Tokens, step: jax.Array
) -> tuple[Any, dict[str, Any], Slots]:
    """Return the gradients that the optimizer gets, those before a cast, and the slots.

    Gradients before the cast are by name, of parameters whose dtype the cast changes.
    """
    model = task.model
    grads, seen = gradients(model, state, batch, step)
    grads = task.trained(grads)
    stored, exact = model.store_gradients(grads), named(grads)
    dtypes = {name: g.dtype for name, g in named(stored).items()}
    return stored, {n: g for n, g in exact.items() if g.dtype != dtypes[n]}, seen


def tensor_figures(
    data: jax.Array,
    scale: Any,
    exact: jax.Array | None,
    settings: tuple[FloatFormat | None, bool, bool],
) -> jax.Array:
    """Return the figures of a stored tensor: [4], or [L, 4] of a stack of layers.

    Args:
      data: the stored values.
      scale: their scale; 1 for a plain array.
      exact: values before the cast, as in `probe.figures`; or None.
      settings: the format of the cast to come, whether zeros count (both as in
        `probe.figures`), and whether the tensor is a stack.
    """
    fmt, zeros, stacked = settings
    measure = functools.partial(figures, zeros=zeros)
    if not stacked:
        return measure(with_scale(data, scale), fmt, exact)
    scale = jnp.broadcast_to(jnp.reshape(scale, -1), data.shape[:1])
    if exact is None:
        return jax.vmap(lambda data, scale: measure(with_scale(data, scale), fmt))(
            data, scale
        )
    return jax.vmap(
        lambda data, scale, exact: measure(with_scale(data, scale), None, exact)
    )(data, scale, exact)


def by_layer(
    model: Model, layers: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and figures [4] of every layer in the order of a forward pass.

    Stacks are taken apart.
    """
    single: dict[str, np.ndarray] = {}
    for name, values in layers.items():
        if is_stack(model, name):
            blocks, _, rest = name.partition(".")
            single |= {f"{blocks}.{i}.{rest}": row for i, row in enumerate(values)}
        else:
            single[name] = values
    parts = (SIDES[0], *model.family.parts, SIDES[1])
    place = {part: i for i, part in enumerate(parts)}
    yield from sorted(single.items(), key=lambda item: order(item[0], place))


def order(name: str, place: Mapping[str, int]) -> list[int]:
    """Return the sort key of a layer or parameter.

    Blocks go by number, parts by `place`, and unknown parts come last.
    """
    return [
        int(part) if part.isdecimal() else place.get(part, len(place))
        for part in name.split(".")
    ]


def make_numerics(
    task: TrainTask, sharpness: Sharpness | None = None
) -> Callable[[TrainState, Tokens, int], dict[str, float]]:
    """Return `(state, batch, step) -> row`, which measures a state on a batch.

    It is compiled at the first call, and again when static scales have changed. The
    state is not donated. Stored tensors are measured one by one, by a small program for
    each shape: reductions over all tensors within the gradients' program take longer to
    compile than the train step.

    Args:
      task: the model and its training.
      sharpness: measures that, too; None: it is left out.
    """
    model, optimizer = task.model, task.optimizer_name
    jit = functools.partial(task.jit, out_shardings=replicated(task.mesh))
    pull = jit(functools.partial(stored_gradients, task))
    measure = jit(tensor_figures, static_argnums=3)
    gather = jit(lambda params: params)
    forward, _ = casts(model.policy, "")
    kernels = {
        name for name, role in named(model.roles).items() if model.is_narrow(role)
    }

    def figures_by_name(
        tensors: dict[str, Any],
        exact: dict[str, Any],
        cast: Collection[str] = (),
        *,
        zeros: bool,
    ) -> Slots:
        measured = {}
        for name, x in tensors.items():
            data, scale = (x.data, x.scale) if is_scaled_array(x) else (x, 1.0)
            uncast: Any = exact.get(name)
            if is_scaled_array(uncast):
                uncast = uncast.data
            settings = (forward if name in cast else None, zeros, is_stack(model, name))
            # One after the other: concurrent programs of several devices can deadlock.
            measured[name] = jax.block_until_ready(
                measure(data, jnp.asarray(scale, jnp.float32), uncast, settings)
            )
        return measured

    def numerics(split: TrainState, batch: Tokens, step: int) -> dict[str, float]:
        state = dataclasses.replace(split, params=gather(split.params))
        moments = tree.unpack(state.opt_state)
        mu, nu = (fields_of(moments, optimizer, key) for key in MOMENT_KEYS)
        narrow = {
            name: nu[name] for name in mu if is_scaled_array(mu[name]) and name in nu
        }
        grads, exact, seen = pull(state, batch, np.int32(step))
        measured = {
            "weights": figures_by_name(named(state.params), {}, kernels, zeros=False),
            "activations": {name: both[..., 0, :] for name, both in seen.items()},
            "activation_gradients": {
                name: both[..., 1, :] for name, both in seen.items()
            },
            "weight_gradients": figures_by_name(named(grads), exact, zeros=True),
            "mu": figures_by_name(mu, narrow, zeros=False),
            "nu": figures_by_name(nu, {}, zeros=False),
        }
        measured = jax.device_get(measured)
        row = {} if sharpness is None else sharpness(split, grads, batch, step)
        for kind in CLASSES:
            for layer, values in by_layer(model, measured[kind]):
                for figure, value in zip(FIGURES, values.tolist(), strict=True):
                    row[f"numerics/{kind}/{layer}/{figure}"] = value
        return {name: float(f"{value:.6g}") for name, value in row.items()}

    return numerics
