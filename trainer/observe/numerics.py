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

A stored zero does not show whether it was rounded to zero. So underflow is counted by
class:

- Operands of narrow matmuls (weights, inputs, gradients of outputs): the elements that
  the next cast makes zero. This is exact, with two exceptions: operands are measured
  before `clip_outliers` clips them, and under `model.mlp=smooth_swiglu` the kernel of
  the down projection before its rows are multiplied by the channels' divisors.
- Weight gradients that were cast: the elements that the cast made zero. Exact.
- First moments: the zeros whose second moment is not zero. Exact if the optimizer has
  both moments.
- Other stored tensors: the subnormal numbers. Zeros do not count: biases start as
  zeros, unseen rows of an embedding keep zero moments, and a second moment is never
  stored as zero unless it is zero (`scalify_core.optim`).
- All others: the zeros and subnormals of the tensor's format. This is an upper
  bound, because gradients of unseen rows and dropped values count too. Operands belong
  here where matmuls measure their scales (`Method.measures_scales`: delayed, current,
  the block formats): these casts do not use the tensor's scale.

Saturation is counted for the format of the next cast, or else for the tensor's format.

Operands of narrow matmuls with a scale for each block or row also have
`blocks.BLOCK_FIGURES`: weights, inputs, and gradients of outputs, as they are cast for
the output and for the gradient of the input.

On request the row also has `sharpness/logits` and `sharpness/critical`; see
`sharpness`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalify_core.array.scaled_array import data_of, is_scaled_array, with_scale
from scalify_core.numerics.formats import FloatFormat
from trainer.model import Model
from trainer.models.blocks import BLOCKS
from trainer.observe.probe import SLOT_SHAPE, Measure, array_figures, probe
from trainer.observe.records import FIGURE_NAMES
from trainer.observe.sharpness import Sharpness
from trainer.parallel.mesh import replicated
from trainer.precision.blocks import BLOCK_FIGURES, Cast, block_figures
from trainer.precision.methods import Blocks
from trainer.precision.policy import Policy
from trainer.step.optimizers import MOMENT_KEYS, OPTIMIZERS
from trainer.step.packing import unpack
from trainer.step.state import TrainState
from trainer.step.step import Tokens, sequence_keys
from trainer.workload import TrainTask

# Tensor classes, and their titles in pictures.
CLASS_TITLES = {
    "weights": "Weights",
    "activations": "Activations",
    "activation_gradients": "Gradients of activations",
    "weight_gradients": "Gradients of weights",
    "mu": "First moments (narrow ones nearly fill their format)",
    "nu": "Second moments (narrow ones are roots that nearly fill their format)",
}
SIDES = ("in", "out")

# Keyed by `h.3.ln_2.out`, or for stacked blocks `h.ln_2.out`, with a leading axis L.
SlotsByName = dict[str, jax.Array]


class SlotVariable(nnx.Variable):
    """The second argument of a probe, whose gradient is the measurement."""


# A cast of an operand in blocks, and the format of the elements.
BlockCast = tuple[Cast, FloatFormat]


class NextCast(NamedTuple):
    """The next cast of a tensor; the fields are None where there is none.

    Attributes:
      fmt: the format of a cast that uses the tensor's scale.
      blocks: a cast in blocks.
    """

    fmt: FloatFormat | None = None
    blocks: BlockCast | None = None

    def measure(
        self, x: Any, uncast: Any = None, *, count_zeros: bool = True, axis: int = 1
    ) -> jax.Array:
        """Return the figures of a tensor before the cast, and those of its blocks.

        Args:
          x: the tensor.
          uncast: see `probe.array_figures`.
          count_zeros: see `probe.array_figures`.
          axis: the axis of a matrix that the product sums over.
        """
        row = array_figures(x, self.fmt, uncast, count_zeros=count_zeros)
        if self.blocks is None:
            return row
        cast, fmt = self.blocks
        return jnp.concatenate([row, block_figures(data_of(x), cast, axis, fmt)])


class FigureProbe(nnx.Module):
    """A probe with its slot, and the measures of an array and its gradient."""

    def __init__(self, slot: jax.Array, forward: Measure, backward: Measure) -> None:
        self.slot = SlotVariable(slot)
        self.forward = forward
        self.backward = backward

    def __call__(self, x: jax.Array) -> jax.Array:
        return probe(x, self.slot[...], forward=self.forward, backward=self.backward)


class ProbedModule(nnx.Module):
    """A module with probes of its input and output."""

    def __init__(self, module: Any, probes: dict[str, FigureProbe]) -> None:
        self.module = module
        self.input_probe = probes.get("in")
        self.output_probe = probes.get("out")

    def __call__(self, x: jax.Array, *args: Any, **settings: Any) -> jax.Array:
        if self.input_probe is not None:
            x = self.input_probe(x)
        y = self.module(x, *args, **settings)
        if self.output_probe is None:
            return y
        return self.output_probe(y)

    @property
    def bias(self) -> Any:
        """The module's bias, for a caller that adds it itself."""
        # GPT-2's MLP hands the bias of `c_fc` to its GELU.
        return self.module.bias


def probed_layers(model: nnx.Module) -> list[tuple[tuple[Any, ...], Any]]:
    """Return path and module of every layer that has `probes`, the innermost first."""
    layers = [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if getattr(module, "probes", ())
    ]
    # The inner ones are replaced first: within a `ProbedModule` the path to a layer is
    # another one.
    return sorted(layers, key=lambda layer: -len(layer[0]))


def layer_name(path: tuple[Any, ...]) -> str:
    """Return the name of a module at a path, such as `h.3.mlp.c_fc`."""
    return ".".join(map(str, path))


def is_stack(model: Model, name: str) -> bool:
    """Return whether a parameter or layer is stacked over all blocks."""
    return model.spec.scan_layers and name.split(".")[0] == BLOCKS


def make_slots(model: Model) -> SlotsByName:
    """Return zeros for the slot of every probe."""
    functions = model.training
    # A trace by shapes: the layers are needed, and no weights.
    abstract = nnx.eval_shape(
        lambda params: functions.bind(params, functions.init_histories()),
        functions.shapes,
    )
    slots = {}
    for path, module in probed_layers(abstract):
        name = layer_name(path)
        for side in module.probes:
            # A probe whose matmul is cast in blocks has more columns; which ones is
            # known before the slots are filled.
            rows, columns = SLOT_SHAPE
            if any(cast.blocks for cast in next_casts(model, name, side)):
                columns += len(BLOCK_FIGURES)
            stack = (model.spec.n_layer,) if is_stack(model, name) else ()
            slots[f"{name}.{side}"] = jnp.zeros((*stack, rows, columns), jnp.float32)
    return slots


def operand_format(policy: Policy, name: str | None) -> FloatFormat | None:
    """Return the format of a matmul's operand by its name in the policy.

    None: the operand is not cast, or its cast does not use the tensor's scale.
    """
    if name is None or policy.method.measures_scales:
        return None
    return FloatFormat.parse(name)


def narrow_path(model: Model, name: str) -> str:
    """Return a layer's path as in `Model.narrow`; in a stack, `h.*.mlp.c_fc`."""
    if is_stack(model, name):
        return name.replace(".", ".*.", 1)
    return name


def next_casts(model: Model, name: str, side: str) -> tuple[NextCast, NextCast]:
    """Return the next casts of an input or output and of its gradient."""
    path = narrow_path(model, name)
    no_cast = NextCast()
    if path not in model.narrow:
        return no_cast, no_cast
    policy = model.policy
    input_blocks, _, gradient_blocks = block_casts(policy)
    backward = policy.backward_of(path)
    if side == "in":
        return NextCast(operand_format(policy, policy.forward), input_blocks), no_cast
    return no_cast, NextCast(operand_format(policy, backward), gradient_blocks)


# Asked for each side of each layer.
@functools.cache
def block_casts(policy: Policy) -> tuple[BlockCast | None, ...]:
    """Return the casts in blocks of a matmul's input, kernel, and output gradient.

    They are None where operands have one scale.
    """
    method = policy.method
    forward, backward = policy.forward, policy.backward
    if not isinstance(method, Blocks) or forward is None or backward is None:
        return None, None, None
    # With a wide forward pass only the gradient matmuls are FP8, so their operands take
    # the backward format.
    if policy.has_wide_forward:
        forward = backward
    formats = [FloatFormat.parse(name) for name in (forward, forward, backward)]
    recipe = method.recipe(policy, native=False)
    casts = recipe.activation, recipe.weight, recipe.gradient
    return tuple(zip(casts, formats, strict=True))


def format_name(model: Model, kind: str, layer: str) -> str:
    """Return the format of the next cast of a tensor, or its stored format without one.

    Args:
      model: the model in its precision.
      kind: the class of the tensor, a key of CLASS_TITLES.
      layer: the part LAYER of the tensor's name in a row, `numerics/CLASS/LAYER`.
    """
    policy = model.policy
    if kind in MOMENT_KEYS:
        return str(getattr(policy, kind))
    if is_stack(model, layer):
        # Roles and casts have one name for all blocks of a stack.
        blocks, _, rest = layer.split(".", 2)
        layer = f"{blocks}.{rest}"
    path, _, side = layer.rpartition(".")
    if side in SIDES:
        tensor_cast, gradient_cast = next_casts(model, path, side)
        if kind == "activations":
            return str(policy.forward if tensor_cast.fmt else policy.compute)
        backward = policy.backward_of(narrow_path(model, path))
        return str(backward if gradient_cast.fmt else policy.compute)
    is_narrow = model.is_narrow(leaves_by_name(model.roles).get(layer))
    if kind == "weight_gradients":
        return str(policy.weight_grad if is_narrow else policy.weights)
    has_cast = is_narrow and operand_format(policy, policy.forward) is not None
    return str(policy.forward if has_cast else policy.weights)


def attach_probes(model: Model, bound: Any, slots: SlotsByName) -> Any:
    """Put a probe at every slot of the bound model, and return the model."""
    for path, module in probed_layers(bound):
        name = layer_name(path)
        probes = {}
        for side in module.probes:
            forward, backward = next_casts(model, name, side)
            slot = slots[f"{name}.{side}"]
            probes[side] = FigureProbe(slot, forward.measure, backward.measure)
        *parents, last_key = path
        parent: Any = bound
        for key in parents:
            parent = parent[key] if isinstance(key, int) else getattr(parent, key)
        if isinstance(last_key, int):
            parent[last_key] = ProbedModule(module, probes)
        else:
            setattr(parent, last_key, ProbedModule(module, probes))
    return bound


def with_probes(model: Model, slots: SlotsByName) -> Model:
    """Return the model with probes in its training, whose slots are `slots`."""

    def bind(*arguments: Any) -> Any:
        return attach_probes(model, model.training.bind(*arguments), slots)

    return model._replace(training=model.training._replace(bind=bind))


def gradients(
    model: Model, state: TrainState, batch: Tokens, step: jax.Array
) -> tuple[Any, SlotsByName]:
    """Return the gradients of the first micro-batch, and the filled slots.

    Dropout depends on the number `step`.
    """
    method = model.policy.method
    keys_B = sequence_keys(jax.random.fold_in(state.key, step), batch)[0]

    def probed_gradients(
        params: Any,
        slots: SlotsByName,
        tokens: jax.Array,
        segments: jax.Array | None,
        keys_B: jax.Array,
    ) -> Any:
        def loss(params: Any, slots: SlotsByName) -> jax.Array:
            return with_probes(model, slots).loss(
                params, tokens, segments, keys_B, **method.loss_arguments(state.scaling)
            )

        # The cotangent is the loss scale, so that gradients of activations are measured
        # at the size at which the run rounds them.
        loss_scale = jnp.asarray(method.loss_scale(state.scaling))
        return jax.vjp(loss, params, slots)[1](loss_scale)

    # As in the sharpness, the first micro-batch stands for the batch.
    micro_batch: Tokens = jax.tree.map(lambda x: x[0], batch)
    grads, filled_slots = method.transform(probed_gradients, model.policy)(
        state.params, make_slots(model), *micro_batch, keys_B
    )
    # The slots are not unscaled: they are figures, not gradients.
    return method.unscale(grads, state.scaling), filled_slots


def leaves_by_name(tree: Any, field: str | None = None) -> dict[str, Any]:
    """Return the leaves of a tree by parameter name; a ScaledArray is one leaf.

    With `field`, only the leaves below the fields of this name of an optimizer's state.
    """
    arrays = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled_array):
        if field is not None:
            names = [getattr(key, "name", None) for key in path]
            if field not in names:
                continue
            # The path leads through the optimizer's state to the field; behind it is
            # that of the parameter.
            path = path[names.index(field) + 1 :]
        arrays[jax.tree_util.keystr(path, simple=True, separator=".")] = x
    return arrays


def moments_by_name(state: Any, optimizer: str, key: str) -> dict[str, Any]:
    """Return the moments whose format is `precision.KEY`, by parameter name."""
    moments: dict[str, Any] = {}
    for moment in OPTIMIZERS[optimizer].moments:
        if moment.key == key:
            moments |= leaves_by_name(state, moment.field)
    return moments


def stored_gradients(
    task: TrainTask, state: TrainState, batch: Tokens, step: jax.Array
) -> tuple[Any, dict[str, Any], SlotsByName]:
    """Return the gradients as stored, some of them before their cast, and the slots.

    The optimizer gets the stored gradients. Those before the cast are keyed by name,
    and are only of parameters for which the cast changes the dtype.
    """
    model = task.model
    grads, filled_slots = gradients(model, state, batch, step)
    # Gradients of frozen parameters are dropped, as in the step.
    grads = task.select_trained(grads)
    stored = model.store_gradients(grads)
    dtypes = {name: g.dtype for name, g in leaves_by_name(stored).items()}
    # A cast to the same dtype loses nothing.
    uncast = {
        name: g for name, g in leaves_by_name(grads).items() if g.dtype != dtypes[name]
    }
    return stored, uncast, filled_slots


def stored_figures(
    data: jax.Array,
    scale: Any,
    uncast: jax.Array | None,
    cast: NextCast,
    count_zeros: bool,
    is_stacked: bool,
) -> jax.Array:
    """Return the figures of a stored tensor, [figures]; of a stack, [L, figures].

    Args:
      data: the stored values.
      scale: their scale; 1 for a plain array.
      uncast: values before the cast; or None.
      cast: the next cast of the tensor.
      count_zeros: whether zeros count as underflow.
      is_stacked: whether the tensor is a stack of layers.
    """

    def measure(data: jax.Array, scale: Any, uncast: Any) -> jax.Array:
        x = with_scale(data, scale)
        return cast.measure(x, uncast, count_zeros=count_zeros, axis=0)

    if not is_stacked:
        return measure(data, scale, uncast)
    # A stack has a scale for each layer, or one scale for all.
    scale = jnp.broadcast_to(jnp.reshape(scale, -1), data.shape[:1])
    return jax.vmap(measure, (0, 0, None if uncast is None else 0))(data, scale, uncast)


class StoredTensors:
    """Measures stored tensors one by one, by a small program for each shape.

    Reductions over all tensors within the gradients' program take longer to compile
    than the train step.
    """

    def __init__(self, task: TrainTask) -> None:
        self.model = task.model
        self._measure = task.jit(
            stored_figures,
            static_argnums=(3, 4, 5),
            out_shardings=replicated(task.mesh),
        )
        policy = self.model.policy
        _, kernel_blocks, _ = block_casts(policy)
        cast = NextCast(operand_format(policy, policy.forward), kernel_blocks)
        self.kernel_casts = {
            name: cast
            for name, role in leaves_by_name(self.model.roles).items()
            if self.model.is_narrow(role)
        }

    def figures(
        self,
        tensors: Mapping[str, Any],
        uncast: Mapping[str, Any],
        casts: Mapping[str, NextCast],
        *,
        count_zeros: bool,
    ) -> dict[str, jax.Array]:
        """Return the figures of each tensor, keyed by its name.

        Args:
          tensors: stored tensors by parameter name.
          uncast: those before the cast, of the tensors that have been cast.
          casts: the next casts, of the tensors that have one.
          count_zeros: whether zeros count as underflow.
        """
        measured = {}
        for name, x in tensors.items():
            # A scale of 1, so that one program serves plain arrays and ScaledArrays.
            data, scale = (x.data, x.scale) if is_scaled_array(x) else (x, 1.0)
            # One after the other: concurrent programs of several devices can deadlock.
            measured[name] = jax.block_until_ready(
                self._measure(
                    data,
                    jnp.asarray(scale, jnp.float32),
                    data_of(uncast.get(name)),
                    casts.get(name, NextCast()),
                    count_zeros,
                    is_stack(self.model, name),
                )
            )
        return measured


def in_forward_order(
    model: Model, layers: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and figures of every layer in the order of a forward pass.

    A stack gives one pair for each of its layers.
    """
    unstacked: dict[str, np.ndarray] = {}
    for name, values in layers.items():
        if is_stack(model, name):
            blocks, _, rest = name.partition(".")
            unstacked |= {f"{blocks}.{i}.{rest}": row for i, row in enumerate(values)}
        else:
            unstacked[name] = values
    # The input of a block comes before its parts, its output after them.
    parts = (SIDES[0], *model.family.forward_order, SIDES[1])
    ranks = {part: i for i, part in enumerate(parts)}
    yield from sorted(unstacked.items(), key=lambda item: sort_key(item[0], ranks))


def sort_key(name: str, ranks: Mapping[str, int]) -> list[int]:
    """Return the sort key of a layer or parameter.

    Blocks are sorted by number, parts by rank; unknown parts come last.
    """
    return [
        int(part) if part.isdecimal() else ranks.get(part, len(ranks))
        for part in name.split(".")
    ]


def figure_row(
    model: Model, measured: Mapping[str, dict[str, np.ndarray]]
) -> dict[str, float]:
    """Return `numerics/CLASS/LAYER/FIGURE` from the figures by class and layer."""
    figure_names = (*FIGURE_NAMES, *BLOCK_FIGURES)
    row = {}
    for kind in CLASS_TITLES:
        for layer, values in in_forward_order(model, measured[kind]):
            # Only some layers have figures of blocks.
            for figure, value in zip(figure_names, values.tolist(), strict=False):
                # NaN in one of the four figures is a result and stays; among the
                # figures of blocks it says that there is none.
                if figure in FIGURE_NAMES or not math.isnan(value):
                    row[f"numerics/{kind}/{layer}/{figure}"] = value
    return row


def make_numerics(
    task: TrainTask, sharpness: Sharpness | None = None
) -> Callable[[TrainState, Tokens, int], dict[str, float]]:
    """Return `(state, batch, step) -> row`, which measures a state on a batch.

    It is compiled at the first call, and again when static scales have changed. The
    state is not donated.

    Args:
      task: the model and its training.
      sharpness: adds its figures to the row; None: they are left out.
    """
    model = task.model
    jit = functools.partial(task.jit, out_shardings=replicated(task.mesh))
    get_gradients = jit(functools.partial(stored_gradients, task))
    # The measured model has no collectives of its own (`parallel.distribute`), so it
    # gets whole parameters.
    gather = jit(lambda params: params)
    stored = StoredTensors(task)

    def numerics(
        sharded_state: TrainState, batch: Tokens, step: int
    ) -> dict[str, float]:
        state = dataclasses.replace(sharded_state, params=gather(sharded_state.params))
        params = leaves_by_name(state.params)
        moments = unpack(state.opt_state)
        mu, nu = (
            moments_by_name(moments, task.optimizer_settings.name, key)
            for key in MOMENT_KEYS
        )
        # A zero first moment was rounded to zero where the second one is not zero.
        nu_of_narrow_mu = {
            name: nu[name] for name in mu if is_scaled_array(mu[name]) and name in nu
        }
        grads, uncast_grads, slots = get_gradients(state, batch, np.int32(step))
        named_grads = leaves_by_name(grads)
        measured = {
            "weights": stored.figures(
                params, {}, stored.kernel_casts, count_zeros=False
            ),
            # a slot: the figures of an activation, then those of its gradient
            "activations": {name: slot[..., 0, :] for name, slot in slots.items()},
            "activation_gradients": {
                name: slot[..., 1, :] for name, slot in slots.items()
            },
            "weight_gradients": stored.figures(
                named_grads, uncast_grads, {}, count_zeros=True
            ),
            "mu": stored.figures(mu, nu_of_narrow_mu, {}, count_zeros=False),
            "nu": stored.figures(nu, {}, {}, count_zeros=False),
        }
        # The sharpness maps the devices itself, and takes the shards.
        row = {} if sharpness is None else sharpness(sharded_state, grads, batch, step)
        # One transfer for all figures.
        row |= figure_row(model, jax.device_get(measured))
        # Six digits draw a chart; all 17 would make a row more than twice as long.
        return {name: float(f"{value:.6g}") for name, value in row.items()}

    return numerics
