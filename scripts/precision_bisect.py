"""Which layer hurts? Casts of a run's narrow matmuls, left out in turn: what that does
to the loss and to the gradient.

The model of RUN's newest checkpoint, one batch of its training data, and four casts of
every narrow matmul: of the activations, of the weights, of the gradient of the output,
and of the weight gradient on its way to the optimizer. All of them belong to one
compiled program, in which each has a switch. Left out are: one cast of one layer, all
casts of one layer, one cast of all layers; and the compute format of everything else.
What is compared with is FP32 throughout. Master weights are what the checkpoint has; no
wider ones exist.

Prints, best first, what is left of the gradient's error, and writes all of it as JSON.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scalify_core import FloatFormat, cast_on_forward, weights
from scalify_core.array import is_scaled_array
from scalify_core.matmul import MULTIPLE
from scripts.arguments import argument, note, run
from trainer.assembly.saved_model import restore_training
from trainer.errors import UserError
from trainer.files import write_text
from trainer.models.roles import role_of
from trainer.observe.progress import log_first_duration
from trainer.parallel.mesh import place_batch
from trainer.precision.arrays import with_prepared_operands
from trainer.precision.dots import Dims, Dot, narrow_gradient_dot, wide_gradient_dot
from trainer.precision.methods import METHODS
from trainer.precision.policy import Policy
from trainer.workload import Model

CASTS = ("activations", "weights", "gradients", "weight_gradients")
ALL = "all"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("a run directory with a checkpoint")
    batch: int = argument(
        "number of the training batch, of which the first micro-batch is taken", 0
    )
    top: int = argument("lines of each table that are printed", 12)


class Finding(NamedTuple):
    """What leaving out some casts does.

    Attributes:
      layer: path of the linear layer; "all".
      tensor: of CASTS; "all" four; "none": as trained; "compute": the format of
          everything else.
      loss: nats.
      loss_difference: to FP32's.
      cosine: between the gradient, as the optimizer gets it, and FP32's.
      error: norm of their difference over that of FP32's.
    """

    layer: str
    tensor: str
    loss: float
    loss_difference: float
    cosine: float
    error: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cast_forward(x: jax.Array, on: jax.Array, fmt: FloatFormat) -> jax.Array:
    """`x`, rounded to the format where the switch is on; the gradient passes."""
    return jnp.where(on, cast_on_forward(x, fmt), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cast_backward(x: jax.Array, on: jax.Array, fmt: FloatFormat) -> jax.Array:
    """`x`; its gradient is rounded to the format where the switch is on."""
    del on, fmt
    return x


cast_forward.defvjp(
    lambda x, on, fmt: (cast_forward(x, on, fmt), None), lambda fmt, _, g: (g, None)
)
cast_backward.defvjp(
    lambda x, on, fmt: (x, on), lambda fmt, on, g: (cast_forward(g, on, fmt), None)
)


class SwitchedDot:
    """A narrow product, simulated: each of its casts has a switch, in row `layer` of
    `on_Lx4`.
    """

    def __init__(
        self, on_Lx4: jax.Array, layer: int, path: str, policy: Policy
    ) -> None:
        backward = policy.backward_of(path)
        assert policy.forward is not None
        assert backward is not None
        self.on_Lx4, self.layer, self.simulate = on_Lx4, layer, policy.simulate
        self.forward, self.backward = (
            FloatFormat.parse(policy.forward),
            FloatFormat.parse(backward),
        )

    def __call__(
        self, lhs_NxD: jax.Array, rhs_DxF: jax.Array, dims: Dims, **_: Any
    ) -> jax.Array:
        if not self.simulate and any(
            size % MULTIPLE for size in (*lhs_NxD.shape, *rhs_DxF.shape)
        ):
            # too odd for FP8 in the run as well
            return wide_gradient_dot(lhs_NxD, rhs_DxF, dims)
        on_4 = self.on_Lx4[self.layer]
        lhs_NxD = cast_forward(lhs_NxD, on_4[0], self.forward)
        rhs_DxF = cast_forward(rhs_DxF, on_4[1], self.forward)
        return cast_backward(
            wide_gradient_dot(lhs_NxD, rhs_DxF, dims), on_4[2], self.backward
        )


def computed_in_fp32(policy: Policy) -> Policy:
    """The policy with its casts, and the rest of what it computes in FP32."""
    changes: dict[str, Any] = {"compute": "fp32", "update": "fp32"}
    if policy.forward is None and policy.weights != "bf16":
        # no matmul is narrower than what weight gradients are computed in
        changes["weight_grad"] = "fp32"
    return dataclasses.replace(policy, **changes)


def in_fp32(policy: Policy) -> Policy:
    """The policy with products, weights and gradients in FP32."""
    wide: dict[str, Any] = {
        "scaling": "none",
        "weights": "fp32",
        "weight_grad": "fp32",
        "compute": "fp32",
    }
    of_products = ("forward", "backward", "backward_e4m3", "clip_outliers", "hadamard")
    return dataclasses.replace(
        policy, simulate=False, **wide, **dict.fromkeys(of_products)
    )


def switched(model: Model, on_Lx4: jax.Array) -> Model:
    """The model with a switch for each of the CASTS of its narrow layers."""

    def dot_general(path: str) -> Dot:
        if path not in model.narrow:
            return (
                wide_gradient_dot
                if model.policy.weight_grad == "fp32"
                else narrow_gradient_dot
            )
        dot = SwitchedDot(on_Lx4, model.narrow.index(path), path, model.policy)
        return with_prepared_operands(dot, model.policy)

    settings = {"rescale_grads": model.policy.rescaled_places}
    build, compute_dtype = model.family.build, model.policy.logical
    training = build(
        model.spec, compute_dtype=compute_dtype, dot_general=dot_general, **settings
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
    """The loss, and the gradient in FP32 as the optimizer gets it."""
    loss, grads, _ = (
        switched(model, on_Lx4)
        .differentiate()
        .value_and_grad(params, scaling, tokens, segments, None)
    )

    def choose(path: Any, stored: Any, exact: Any) -> jax.Array:
        role = role_of(model.roles, path)
        if role is None or role.layer is None or not model.is_narrow(role):
            return weights.wide(stored)
        return jnp.where(
            on_Lx4[model.narrow.index(role.layer), 3],
            weights.wide(stored),
            weights.wide(exact),
        )

    stored = model.store_gradients(grads)
    return loss, jax.tree_util.tree_map_with_path(
        choose, stored, grads, is_leaf=is_scaled_array
    )


def switches(layers: Sequence[str]) -> dict[tuple[str, str], np.ndarray]:
    """Layer and tensor to what is on, bool `[L, 4]`."""
    everything = np.ones((len(layers), len(CASTS)), bool)

    def off(rows: Any, columns: Any) -> np.ndarray:
        on = everything.copy()
        on[rows, columns] = False
        return on

    found = {(ALL, "none"): everything, (ALL, ALL): ~everything}
    found |= {(ALL, tensor): off(slice(None), j) for j, tensor in enumerate(CASTS)}
    found |= {(layer, ALL): off(i, slice(None)) for i, layer in enumerate(layers)}
    return found | {
        (layer, t): off(i, j)
        for i, layer in enumerate(layers)
        for j, t in enumerate(CASTS)
    }


def bisect(
    model: Model,
    params: Any,
    scaling: Any,
    tokens: jax.Array,
    segments: jax.Array | None,
) -> list[Finding]:
    """What every cast does, the one whose absence leaves the least error first.

    Args:
      model: of unrolled layers, without remat.
      params: as the run stores them; scales are static.
      scaling: a loss scale, or ().
      tokens: [B, T+1].
      segments: of the same shape, or None.

    Raises:
      UserError: nothing is narrow, or its scales are not those of the tensors.
    """
    if model.policy.method.in_products:
        valid = [name for name, method in METHODS.items() if not method.in_products]
        raise UserError(
            f"precision.scaling={model.policy.scaling} casts by scales that are"
            f" measured in the matmul; valid: runs with scaling={' or '.join(valid)}"
        )
    if not model.narrow and model.policy.compute == "fp32":
        raise UserError(
            "everything in this run is FP32 already; valid: a run with a narrower"
            " precision"
        )
    exact = Model.make(model.spec, in_fp32(model.policy), border=model.border)
    none = jnp.zeros((0, len(CASTS)), bool)
    value_and_grad = log_first_duration(
        jax.jit(functools.partial(gradient, exact)), "compiling in FP32", note
    )
    right_loss, right = value_and_grad(weights.wide(params), (), tokens, segments, none)

    def measures(
        model: Model, on_Lx4: Any, params: Any, scaling: Any, right: Any
    ) -> tuple[jax.Array, ...]:
        loss, grads = gradient(model, params, scaling, tokens, segments, on_Lx4)
        dot = sum(
            jnp.vdot(g, r)
            for g, r in zip(jax.tree.leaves(grads), jax.tree.leaves(right), strict=True)
        )
        apart = jax.tree.map(jnp.subtract, grads, right)
        norm, right_norm, difference = map(optax.global_norm, (grads, right, apart))
        return loss, dot / (norm * right_norm), difference / right_norm

    def finding(layer: str, tensor: str, measured: Any) -> Finding:
        loss, cosine, error = (float(x) for x in measured)
        return Finding(layer, tensor, loss, loss - float(right_loss), cosine, error)

    measure = log_first_duration(
        jax.jit(functools.partial(measures, model)),
        "compiling with a switch for every cast",
        note,
    )
    findings = [
        finding(*name, measure(on, params, scaling, right))
        for name, on in switches(model.narrow).items()
    ]
    if model.policy.compute != "fp32":
        wide = model._replace(policy=computed_in_fp32(model.policy))
        everything = switches(model.narrow)[ALL, "none"]
        measure = log_first_duration(
            jax.jit(functools.partial(measures, wide)),
            "compiling with FP32 between the products",
            note,
        )
        findings.append(
            finding(ALL, "compute", measure(everything, params, scaling, right))
        )
    return sorted(findings, key=lambda f: np.inf if np.isnan(f.error) else f.error)


def report(findings: Sequence[Finding], top: int) -> str:
    """Three tables: over all layers, layers, single casts."""
    trained = next(f for f in findings if f.tensor == "none")
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
            f for f in findings if f.layer == ALL and f.tensor != "none"
        ],
        "one layer's casts left out": [
            f for f in findings if f.layer != ALL and f.tensor == ALL
        ],
        "one cast left out": [
            f for f in findings if f.layer != ALL and f.tensor != ALL
        ],
    }
    for title, rows in tables.items():
        lines.append(
            f"{title:<34} {'error left':>10} {'removed':>8} {'cosine':>9}"
            f" {'loss - FP32':>12}"
        )
        for f in rows[:top]:
            name = (
                f.tensor
                if f.layer == ALL
                else f.layer
                if f.tensor == ALL
                else f"{f.layer} {f.tensor}"
            )
            removed = 1 - f.error / trained.error if trained.error else 0.0
            lines.append(
                f"  {name:<32} {f.error:>10.3%} {removed:>8.1%} {f.cosine:>9.6f}"
                f" {f.loss_difference:>+12.2e}"
            )
        lines.append("")
    return "\n".join(lines)


def advice(findings: Sequence[Finding], most: int = 4) -> str:
    """The layers to keep out of the narrow format, as the key to set; or that none
    stands out.

    Those count whose casts, left out together, remove twice as much of the gradient's
    error as a layer does on average.
    """
    trained = next(f for f in findings if f.tensor == "none").error
    left = {f.layer: f.error for f in findings if f.layer != ALL and f.tensor == ALL}
    removed = (
        {layer: 1 - error / trained for layer, error in left.items()}
        if trained > 0
        else {}
    )
    mean = sum(max(share, 0.0) for share in removed.values()) / max(len(removed), 1)
    chosen = sorted(
        (layer for layer, share in removed.items() if share > 2 * mean > 0),
        key=lambda x: -removed[x],
    )[:most]
    if not chosen:
        return (
            "no layer stands out: keeping one of them in a wider format would change"
            " little"
        )
    why = ", ".join(f"{layer} {removed[layer]:.1%}" for layer in chosen)
    return (
        "to keep what hurts most in the compute format:"
        f" precision.exclude=[{','.join(chosen)}]   (removes: {why})"
    )


def load(
    run_dir: Path, number: int
) -> tuple[Model, Any, Any, jax.Array, jax.Array | None]:
    """What `bisect` takes, of a run's newest checkpoint and its training batch of this
    number.
    """
    c, w, found = restore_training(run_dir)
    batch = place_batch(
        w.data.train.batch(number), accum=c.train.grad_accum_steps, mesh=w.mesh
    )
    spec = w.model.spec
    params = (
        spec.family().unstack_layers(found.state.params)
        if spec.scan_layers
        else found.state.params
    )
    unrolled = dataclasses.replace(spec, scan_layers=False, remat="none")
    model = Model.make(unrolled, w.model.policy, w.model.rows, border=w.model.border)
    segments = batch.segments_AxBxT1
    return (
        model,
        params,
        found.state.scaling,
        batch.tokens_AxBxT1[0],
        None if segments is None else segments[0],
    )


def main(arguments: Arguments) -> None:
    """Bisect the run, print, and write precision_bisect.json into it."""
    for name, least in (("batch", 0), ("top", 1)):
        if getattr(arguments, name) < least:
            raise UserError(
                f"{name}={getattr(arguments, name)}: expected {least} or more"
            )
    run_dir = Path(arguments.run_dir)
    findings = bisect(*load(run_dir, arguments.batch))
    path = run_dir / "precision_bisect.json"
    write_text(path, json.dumps([f._asdict() for f in findings], indent=1) + "\n")
    print(report(findings, arguments.top))
    print(advice(findings))
    print(f"all of it: {path}")


if __name__ == "__main__":
    sys.exit(run(Arguments, "precision_bisect", __doc__, main))
