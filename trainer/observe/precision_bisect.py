"""The effect of each FP8 cast of a model on its loss and gradient.

`scalify-trainer bisect --help` says which casts are left out. One compiled program has
a switch for each cast. Another has all casts, and FP32 between the matmuls.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalify_core import weights
from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.numerics.formats import FloatFormat
from scalify_core.static import cast_on_forward
from trainer.errors import UserError
from trainer.model import Model
from trainer.models.blocks import unstack_layers
from trainer.models.roles import role_of
from trainer.observe.progress import log_first_duration
from trainer.precision.arrays import with_prepared_operands
from trainer.precision.dots import Dims, Dot, narrow_gradient_dot, wide_gradient_dot
from trainer.precision.methods import METHODS
from trainer.precision.policy import Policy
from trainer.text import note

CASTS = ("activations", "weights", "gradients", "weight_gradients")
ALL = "all"  # layers, or casts of a layer
MAX_LAYERS = 4  # layers that are suggested for precision.exclude


class Finding(NamedTuple):
    """The effect of leaving out some casts.

    Attributes:
      layer: path of the linear layer, or "all".
      left_out: one of CASTS; "all" of them; "none" (the run as trained); "compute" (the
          low precision between the matmuls).
      loss: nats.
      loss_difference: the loss minus the FP32 loss.
      cosine: cosine similarity of the gradient that the optimizer gets and the FP32
          gradient.
      error: norm of the difference of these gradients / norm of the FP32 gradient.
    """

    layer: str
    left_out: str
    loss: float
    loss_difference: float
    cosine: float
    error: float

    def as_json(self) -> dict[str, str | float]:
        """Return the entry of precision_bisect.json."""
        # Files of earlier versions have the key `tensor`.
        return {
            "tensor" if name == "left_out" else name: value
            for name, value in self._asdict().items()
        }


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cast_forward(x: jax.Array, on: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return `x`, rounded to the format if the switch is on; the gradient is not."""
    return jnp.where(on, cast_on_forward(x, fmt), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cast_backward(x: jax.Array, on: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return `x`; its gradient is rounded to the format if the switch is on."""
    del on, fmt
    return x


# The gradient passes as it is: its cast has a switch of its own.
cast_forward.defvjp(
    lambda x, on, fmt: (cast_forward(x, on, fmt), None), lambda fmt, _, g: (g, None)
)
cast_backward.defvjp(
    lambda x, on, fmt: (x, on), lambda fmt, on, g: (cast_forward(g, on, fmt), None)
)


class SwitchedDot:
    """A simulated FP8 matmul; row `layer` of `on_Lx4` has the switches of its casts."""

    def __init__(
        self, on_Lx4: jax.Array, layer: int, path: str, policy: Policy
    ) -> None:
        backward = policy.backward_of(path)
        assert policy.forward is not None
        assert backward is not None
        self.on_Lx4 = on_Lx4
        self.layer = layer
        # Simulated casts take any size, the kernels of a GPU only multiples.
        self.multiple = 1 if policy.simulate else policy.method.multiple
        self.forward = FloatFormat.parse(policy.forward)
        self.backward = FloatFormat.parse(backward)

    def __call__(
        self, lhs_NxD: jax.Array, rhs_DxF: jax.Array, dims: Dims, **_: Any
    ) -> jax.Array:
        sizes = (*lhs_NxD.shape, *rhs_DxF.shape)
        if any(size % self.multiple for size in sizes):
            # The run does not multiply such sizes in FP8 either.
            return wide_gradient_dot(lhs_NxD, rhs_DxF, dims)
        # The columns are in the order of CASTS; the fourth, of weight gradients, is in
        # `gradient`.
        on_4 = self.on_Lx4[self.layer]
        lhs_NxD = cast_forward(lhs_NxD, on_4[0], self.forward)
        rhs_DxF = cast_forward(rhs_DxF, on_4[1], self.forward)
        return cast_backward(
            wide_gradient_dot(lhs_NxD, rhs_DxF, dims), on_4[2], self.backward
        )


def with_fp32_compute(policy: Policy) -> Policy:
    """Return the policy with FP32 for all computation but the casts of matmuls."""
    changes: dict[str, Any] = {"compute": "fp32", "update": "fp32", "attention": None}
    if policy.forward is None and policy.weights != "bf16":
        # Without FP8 matmuls a policy takes no other `weight_grad` than `compute` and
        # FP32; BF16 weights keep BF16 gradients.
        changes["weight_grad"] = "fp32"
    return dataclasses.replace(policy, **changes)


def without_low_precision(policy: Policy) -> Policy:
    """Return the policy with matmuls, weights and gradients in FP32."""
    changes: dict[str, Any] = {
        "scaling": "none",
        "weights": "fp32",
        "weight_grad": "fp32",
        "compute": "fp32",
        "attention": None,
    }
    cast_fields = ("forward", "backward", "backward_e4m3", "clip_outliers", "hadamard")
    changes.update(dict.fromkeys(cast_fields))
    return dataclasses.replace(policy, simulate=False, **changes)


def with_switches(model: Model, on_Lx4: jax.Array) -> Model:
    """Return the model with a switch for each of the CASTS of its FP8 layers."""

    def dot_general_for(path: str) -> Dot:
        if path in model.narrow:
            dot = SwitchedDot(on_Lx4, model.narrow.index(path), path, model.policy)
            return with_prepared_operands(dot, model.policy)
        if model.policy.weight_grad == "fp32":
            return wide_gradient_dot
        return narrow_gradient_dot

    # No `attention`: that of FP8 has no switch, and `bisect` says so.
    training = model.family.build(
        model.spec,
        compute_dtype=model.policy.model_dtype,
        dot_general_for=dot_general_for,
        rescale_grads=model.policy.rescaled_places,
    )
    return model._replace(training=training)


def gradient(
    model: Model,
    params: Any,
    scaling: Any,
    tokens: jax.Array,
    segments: jax.Array | None,
    on_Lx4: jax.Array,
) -> tuple[jax.Array, Any]:
    """Return the loss, and the gradient in FP32 as the optimizer gets it."""
    loss, grads, _ = (
        with_switches(model, on_Lx4)
        .differentiate()
        .value_and_grad(params, scaling, tokens, segments, None)
    )

    def stored_or_uncast(path: Any, stored: Any, uncast: Any) -> jax.Array:
        role = role_of(model.roles, path)
        if role is None or role.layer is None or not model.is_narrow(role):
            # Only the gradients of FP8 kernels have a switch: others are stored as the
            # run stores them.
            return weights.wide(stored)
        return jnp.where(
            on_Lx4[model.narrow.index(role.layer), 3],
            weights.wide(stored),
            weights.wide(uncast),
        )

    stored = model.store_gradients(grads)
    return loss, jax.tree_util.tree_map_with_path(
        stored_or_uncast, stored, grads, is_leaf=is_scaled_array
    )


def unrolled(model: Model, params: Any) -> tuple[Model, Any]:
    """Return the model and its parameters with unrolled layers, without remat."""
    spec = model.spec
    # A scan has one body for all layers, so it has no casts of a single one.
    if spec.scan_layers:
        params = unstack_layers(params)
    # Remat changes no bit, and would compute the forward pass twice.
    unrolled_spec = dataclasses.replace(spec, scan_layers=False, remat="none")
    return Model.make(
        unrolled_spec, model.policy, model.rows, loss_boundary_id=model.loss_boundary_id
    ), params


def switches(layers: Sequence[str]) -> dict[tuple[str, str], np.ndarray]:
    """Return switches, bool `[L, 4]`, keyed by the layer and the cast that is off.

    A key is that of a `Finding`: `layer` and `left_out`.
    """
    all_on = np.ones((len(layers), len(CASTS)), bool)

    def without(rows: Any, columns: Any) -> np.ndarray:
        on_Lx4 = all_on.copy()
        on_Lx4[rows, columns] = False
        return on_Lx4

    all_rows = slice(None)
    result = {(ALL, "none"): all_on, (ALL, ALL): ~all_on}
    for j, cast in enumerate(CASTS):
        result[ALL, cast] = without(all_rows, j)
    for i, layer in enumerate(layers):
        result[layer, ALL] = without(i, all_rows)
    for i, layer in enumerate(layers):
        for j, cast in enumerate(CASTS):
            result[layer, cast] = without(i, j)
    return result


def check_bisectable(model: Model) -> None:
    """Raise UserError as `bisect` says."""
    # Such casts are not by the tensor's scale, so `cast_forward` would not be that of
    # the run.
    if model.policy.method.measures_scales:
        valid_methods = [
            name for name, method in METHODS.items() if not method.measures_scales
        ]
        raise UserError(
            f"precision.scaling={model.policy.scaling} casts by scales that are"
            " measured in the matmul; valid: runs with"
            f" scaling={' or '.join(valid_methods)}"
        )
    if not model.narrow and model.policy.compute == "fp32":
        raise UserError(
            "everything in this run is FP32 already; valid: a run with a narrower"
            " precision"
        )


def bisect(
    model: Model,
    params: Any,
    scaling: Any,
    tokens: jax.Array,
    segments: jax.Array | None,
) -> list[Finding]:
    """Return the effect of every cast; the lowest remaining error comes first.

    Args:
      model: a model with unrolled layers, without remat.
      params: its parameters, as the run stores them; scales are static.
      scaling: a loss scale, or ().
      tokens: [B, T+1].
      segments: [B, T+1], or None.

    Raises:
      UserError: the run is FP32, or its casts do not use the tensors' scales.
    """
    check_bisectable(model)
    fp32_model = Model.make(
        model.spec,
        without_low_precision(model.policy),
        loss_boundary_id=model.loss_boundary_id,
    )
    # The FP32 model has no narrow layers, so no rows.
    no_switches = jnp.zeros((0, len(CASTS)), bool)

    def compiled(fn: Callable[..., Any], model: Model, operation: str) -> Any:
        return log_first_duration(
            jax.jit(functools.partial(fn, model)), f"compiling {operation}", note
        )

    fp32_loss, fp32_grads = compiled(gradient, fp32_model, "in FP32")(
        weights.wide(params), (), tokens, segments, no_switches
    )

    def compare(
        model: Model, on_Lx4: Any, params: Any, scaling: Any, fp32_grads: Any
    ) -> tuple[jax.Array, ...]:
        loss, grads = gradient(model, params, scaling, tokens, segments, on_Lx4)
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(fp32_grads), strict=True)
        dot = sum(jnp.vdot(g, fp32_g) for g, fp32_g in pairs)
        differences = jax.tree.map(jnp.subtract, grads, fp32_grads)
        norm, fp32_norm, difference = map(
            optax.global_norm, (grads, fp32_grads, differences)
        )
        return loss, dot / (norm * fp32_norm), difference / fp32_norm

    def make_finding(layer: str, left_out: str, measured: Any) -> Finding:
        loss, cosine, error = (float(x) for x in measured)
        return Finding(layer, left_out, loss, loss - float(fp32_loss), cosine, error)

    # Compiled once, and run five times a layer: the switches are an argument.
    compare_switched = compiled(compare, model, "with a switch for every cast")
    findings = [
        make_finding(*name, compare_switched(on_Lx4, params, scaling, fp32_grads))
        for name, on_Lx4 in switches(model.narrow).items()
    ]
    if model.policy.compute != "fp32":
        fp32_compute = model._replace(policy=with_fp32_compute(model.policy))
        all_on = switches(model.narrow)[ALL, "none"]
        compare_fp32_compute = compiled(
            compare, fp32_compute, "with FP32 between the matmuls"
        )
        measured = compare_fp32_compute(all_on, params, scaling, fp32_grads)
        findings.append(make_finding(ALL, "compute", measured))
    # NaN has no order, so it is put last.
    return sorted(findings, key=lambda f: np.inf if np.isnan(f.error) else f.error)


def removed_share(finding: Finding, trained: Finding) -> float:
    """Return the share of the gradient's error that leaving out the casts removes."""
    # A run whose casts change nothing has no error to divide by.
    return 1 - finding.error / trained.error if trained.error else 0.0


def report(findings: Sequence[Finding], top: int) -> str:
    """Return three tables: casts of all layers, all casts of one layer, single casts.

    `top` limits the rows of a table.
    """
    trained = next(f for f in findings if f.left_out == "none")
    lines = [
        (
            f"as trained: loss {trained.loss:.5f}, {trained.loss_difference:+.2e} nats"
            f" from FP32; gradient: cosine {trained.cosine:.6f}, error"
            f" {trained.error:.2%}"
        ),
        "",
    ]
    tables = {
        "left out in all layers": [
            f for f in findings if f.layer == ALL and f.left_out != "none"
        ],
        "one layer's casts left out": [
            f for f in findings if f.layer != ALL and f.left_out == ALL
        ],
        "one cast left out": [
            f for f in findings if f.layer != ALL and f.left_out != ALL
        ],
    }
    for title, rows in tables.items():
        lines.append(
            f"{title:<34} {'remaining error':>15} {'removed':>8} {'cosine':>9}"
            f" {'loss - FP32':>12}"
        )
        for f in rows[:top]:
            name = f"{f.layer} {f.left_out}"
            if f.layer == ALL:
                name = f.left_out
            elif f.left_out == ALL:
                name = f.layer
            lines.append(
                f"  {name:<32} {f.error:>15.3%} {removed_share(f, trained):>8.1%}"
                f" {f.cosine:>9.6f} {f.loss_difference:>+12.2e}"
            )
        lines.append("")
    return "\n".join(lines)


def advice(findings: Sequence[Finding]) -> str:
    """Return the key that excludes the worst layers from FP8, or that none stands out.

    A layer stands out if leaving out all its casts removes more than twice as much of
    the gradient's error as for the mean layer.
    """
    trained = next(f for f in findings if f.left_out == "none")
    removed = {
        f.layer: removed_share(f, trained)
        for f in findings
        if f.layer != ALL and f.left_out == ALL
    }
    # Without a cast the error can grow, where two errors cancel; such layers do not
    # lower the mean.
    mean = sum(max(share, 0.0) for share in removed.values()) / max(len(removed), 1)
    worst = sorted(
        (layer for layer, share in removed.items() if share > 2 * mean > 0),
        key=lambda x: -removed[x],
    )[:MAX_LAYERS]
    if not worst:
        return (
            "no layer stands out: keeping one of them in a wider format would change"
            " little"
        )
    effects = ", ".join(f"{layer} {removed[layer]:.1%}" for layer in worst)
    return (
        "to keep the worst layers in the compute format:"
        f" precision.exclude=[{','.join(worst)}]   (removes: {effects})"
    )
