"""The FP8 kernels of a saved run with their scales, as its own products have them."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalify_core import asarray, tree
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.static import get_data_scale
from trainer.assembly.build import build_model
from trainer.assembly.saved_model import open_checkpoint
from trainer.errors import UserError
from trainer.model import Model
from trainer.models.blocks import unstack_layers
from trainer.models.fp8_checkpoints import Fp8Kernel
from trainer.models.layers import DotGeneral, Linear
from trainer.models.model_functions import Params
from trainer.precision.fields import DTYPES
from trainer.run.initial_weights import tokenizer_of_run
from trainer.step.state_tree import as_saved


def restore_fp8_kernels(run_dir: Path, step: int) -> dict[str, Fp8Kernel]:
    """Return the FP8 kernels of a run's checkpoint by the paths of unrolled layers.

    Raises:
      UserError: the run has no FP8 products, or they have not one scale for a weight
        and one for an input.
    """
    with open_checkpoint(run_dir, step) as saved:
        c, meta = saved.config, saved.meta
        tokenizer = tokenizer_of_run(run_dir, meta)
        # The run's rows per device decide which matmuls were in FP8.
        model = build_model(
            c.model, c.precision.policy, tokenizer.vocab_size, meta.get("rows")
        )
        check_exportable(model)

        def initial() -> dict[str, Any]:
            params = model.training.init(jax.random.key(0))
            return {"params": params, "scaling": model.differentiate().init()}

        # Only these two parts of the state are read; with Adam, moments are half of a
        # checkpoint's bytes or more.
        like = as_saved(
            jax.eval_shape(initial), saved.checkpointer.manifest(step).leaves
        )
        state = saved.checkpointer.restore(like, step, partial=True).state
    params = tree.with_static_scales(state["params"])
    return fp8_kernels(model, params, state["scaling"])


def check_exportable(model: Model) -> None:
    """Raise UserError if products cannot be described by a scale for each operand."""
    policy, roles = model.policy, jax.tree.leaves(model.roles)
    narrow = [role for role in roles if model.is_narrow(role)]
    if not model.narrow:
        # One reason is enough: where no matmul is in FP8, layers mostly share it.
        reason = next(iter(model.skipped.values()))
        problem = f"no matmul of this run is in FP8: {reason}"
    # The files have one scale for a weight, and one for an input.
    elif policy.simulate or policy.method.has_blocks:
        problem = (
            f"precision={{scaling: {policy.scaling}, forward: {policy.forward},"
            f" simulate: {str(policy.simulate).lower()}}} has no FP8 matmuls with one"
            " scale for each operand"
        )
    # A reader of the files would multiply operands that were not prepared.
    elif policy.prepares_operands:
        problem = (
            "precision.hadamard and precision.clip_outliers change operands before"
            " they are rounded"
        )
    elif len(narrow) < len(model.narrow) or any(role.scaled_rows for role in narrow):
        problem = (
            "model.mlp=smooth_swiglu and model.value_gain multiply kernels before they"
            " are rounded"
        )
    else:
        return
    raise UserError(f"format=fp8: {problem}; leave format out to export all weights")


def fp8_kernels(model: Model, params: Params, scaling: Any) -> dict[str, Fp8Kernel]:
    """Return the FP8 kernels by the paths of unrolled layers.

    Args:
      model: in its precision, for which `check_exportable` holds.
      params: as they are stored, with static scales.
      scaling: of the state.
    """
    method, spec = model.policy.method, model.spec
    arguments = method.loss_arguments(scaling)
    if spec.scan_layers:
        params = unstack_layers(params)
        arguments = {k: unstack_layers(v) for k, v in arguments.items()}
    # Readers expect a tensor for each layer; a scanned layer has one of all.
    unrolled = dataclasses.replace(spec, scan_layers=False, remat="none")
    model = Model.make(unrolled, model.policy, model.rows)
    input_scales = propagated_scales(model, params, arguments)
    bound = model.training.bind(asarray(params), **arguments)
    dots: dict[str, Any] = {
        path: layer.dot_general for path, layer in fp8_layers(model, bound)
    }
    kernels = {}
    for role, kernel in zip(
        jax.tree.leaves(model.roles), tree.leaves(params), strict=True
    ):
        if not model.is_narrow(role):
            continue
        dot, scale = dots[role.layer], 1.0
        if is_scaled_array(kernel):
            scale = kernel.scale
            kernel = kernel.astype(DTYPES[model.policy.compute]).data
        # The product casts the kernel itself, so that the file has the bits of the
        # training.
        data, own_scale = dot.quantize(kernel)
        input_scale = dot.input_scale
        # Null: the scale is measured for each input, and the reader measures it, too.
        if input_scale is not None:
            input_scale = as_tensor(input_scale * input_scales[role.layer])
        kernels[role.layer] = Fp8Kernel(
            np.asarray(data), as_tensor(own_scale * scale), input_scale
        )
    return kernels


def as_tensor(scale: Any) -> np.ndarray:
    """Return a scale as FP32 [1]."""
    # The shape that compressed-tensors has for a tensor's scale.
    return np.asarray(scale, np.float32).reshape(1)


def fp8_layers(model: Model, bound: Any) -> Iterator[tuple[str, Linear]]:
    """Yield path and module of each linear layer whose matmul is FP8."""
    # A list, because the caller replaces parts of the modules on the way.
    for path, module in list(nnx.iter_modules(bound)):
        name = ".".join(map(str, path))
        if isinstance(module, Linear) and name in model.narrow:
            yield name, module


class InputScale:
    """A matmul that records the static scale of its input."""

    def __init__(self, dot: DotGeneral) -> None:
        self.scale: Any = None
        self._dot = dot

    def __call__(self, lhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Return the product."""
        _, self.scale = get_data_scale(lhs)
        return self._dot(lhs, *args, **kwargs)


def propagated_scales(
    model: Model, params: Params, arguments: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Return the static scale of the input of each FP8 matmul; 1 where none propagate.

    They depend on the parameters' scales, and on the length of sequences, here the
    model's context: attention averages over more values.
    """

    def record(
        params: Params, tokens: jax.Array, histories: Params | None = None
    ) -> dict[str, jax.Array]:
        bound = model.training.bind(params, histories)
        recorders = {}
        for path, layer in fp8_layers(model, bound):
            recorders[path] = layer.dot_general = InputScale(layer.dot_general)
        # Traced for the scales alone: nothing uses the result, so XLA drops its work.
        bound.hidden(tokens)
        return {path: recorder.scale for path, recorder in recorders.items()}

    method = model.policy.method
    # so many sequences that FP8 matmuls take their rows
    tokens = jnp.zeros((method.multiple, model.spec.context), jnp.int32)
    # Jitted as the step is, so that static scales are propagated as in training.
    scales: dict[str, jax.Array] = jax.jit(method.transform(record, model.policy))(
        params, tokens, **arguments
    )
    return asarray(scales)
