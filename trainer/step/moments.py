"""Storage of an optimizer's moments, by its entry in `optimizers` and the policy."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from scalify_core import optim, weights
from scalify_core.numerics.formats import FP32, FloatFormat
from trainer.errors import UserError
from trainer.precision.fields import DTYPES
from trainer.precision.policy import Policy
from trainer.step.clip_and_decay import matrix_mask
from trainer.step.optimizers import (
    MOMENT_KEYS,
    OPTIMIZERS,
    Moment,
    check_moments,
)
from trainer.step.propagated_update import propagated_state
from trainer.step.stacking import NO_STACKS, Stacks


def with_moment_storage(
    tx: optax.GradientTransformation, name: str, policy: Policy, seed: Any
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer, so that a policy decides how it stores moments and computes.

    Args:
      tx: the optimizer.
      name: its key in OPTIMIZERS.
      policy: the precision.
      seed: seed of stochastic rounding, an integer or an integer scalar.

    Raises:
      UserError: the optimizer cannot store its moments as the policy says, see
        `check_moments`; from `init`: the state differs from the entry.
    """
    check_moments(name, policy)

    def with_storage(state: Any) -> optax.GradientTransformationExtraArgs:
        # Which moments there are depends on the state: with kernels alone, Muon has no
        # `nu`.
        fields = storage_by_field(name, policy, state)
        if policy.propagated_update:
            return propagated_state(tx, fields=fields, compute=DTYPES[policy.compute])
        return optim.scaled_state(tx, seed=seed, fields=fields)

    def init(params: Any) -> Any:
        # The optimizer computes in FP32; of its state only the shapes are needed here.
        state = jax.eval_shape(tx.init, weights.wide(params))
        check_state_fields(name, state)
        return with_storage(state).init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return with_storage(state).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def stacks_of(params: Any, roles: Any, name: str, policy: Policy) -> Stacks:
    """Return the small parameters that the optimizer `name` updates together.

    `params` may be shapes.
    """
    if not OPTIMIZERS[name].elementwise:
        return NO_STACKS
    # A propagated update computes a scale for each array; a stack has one for each row.
    if policy.propagated_update:
        return NO_STACKS
    # An update without rounding is cheap, and arrays of one shape share a kernel.
    stored = (policy.weights, *(getattr(policy, key) for key in MOMENT_KEYS))
    if set(stored) == {"fp32"}:
        return NO_STACKS
    # A vector whose role is that of a matrix decays, and needs a stack of its own.
    return Stacks.of(params, matrix_mask(roles))


def fields_of(path: Any) -> list[str]:
    """Return the names of the fields on a path of an optimizer's state."""
    return [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]


def check_state_fields(name: str, state: Any) -> None:
    """Raise UserError if the floating-point fields of an optimizer's state differ from
    its entry.
    """
    entry = OPTIMIZERS[name]
    float_fields = set()
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(x.dtype, jnp.floating):
            fields = fields_of(path) or [jax.tree_util.keystr(path)]
            float_fields.add(fields[-1])
    moments = {moment.field for moment in entry.moments}
    # An undeclared moment would stay FP32 whatever `precision` says about its storage.
    for field in sorted(float_fields - moments - set(entry.unquantized)):
        raise UserError(
            f"optimizer={name} has a state field {field!r} that its entry"
            f" {entry.__name__} in trainer.step.optimizers does not declare; add it to"
            " `moments`, or to `unquantized`"
        )
    required = {moment.field for moment in entry.moments if moment.required}
    for field in sorted(required - float_fields):
        raise UserError(
            f"optimizer={name} has no state field {field!r}, which its entry"
            f" {entry.__name__} in trainer.step.optimizers declares in `moments`; its"
            f" fields are {', '.join(sorted(float_fields)) or 'none'}"
        )


def storage_by_field(name: str, policy: Policy, state: Any) -> dict[str, optim.Stored]:
    """Return the storage of each moment of an optimizer's state, by its field.

    It is the argument `fields` of `scalify_core.optim.scaled_state`. Moments that the
    state lacks, or that are FP32, are left out. `state` may be shapes.
    """
    present: set[str] = set()
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        present.update(fields_of(path))
    formats = {key: FloatFormat.parse(getattr(policy, key)) for key in MOMENT_KEYS}
    narrow = {
        moment.field: moment
        for moment in OPTIMIZERS[name].moments
        if formats[moment.key] is not FP32 and moment.field in present
    }

    def storage_of(moment: Moment) -> optim.Stored:
        fmt = formats[moment.key]
        # A propagated update computes in scaled arrays, which are rounded to nearest.
        if policy.propagated_update:
            return optim.Stored(fmt, rounding="nearest")
        rounding: Any = policy.moments_rounding
        is_second = moment.key == "nu"
        if rounding == "auto":
            # To nearest, an average stops where a step changes it by less than half an
            # ulp. A first moment forgets within ten steps, for which FP16 suffices; a
            # second may take 1000.
            to_nearest = fmt.mantissa_bits >= 10 and not is_second
            rounding = "nearest" if to_nearest else "stochastic"
        relative = None
        # An FP8 tensor has one scale. Divided by the root of the second moment, rows of
        # rare and of frequent tokens have one size: in E4M3 an embedding's error falls
        # from 21% (rows by Zipf's law) to 7.8%.
        if moment.relative_to in narrow and fmt.mantissa_bits <= 3:
            relative = moment.relative_to
        # The root has half the octaves. FP16 would flush small second moments to zero
        # beside first moments that survive. After a gradient of zero the next step
        # would be sqrt(nu) / eps times too large.
        return optim.Stored(
            fmt, sqrt=is_second, rounding=rounding, relative_to=relative
        )

    return {field: storage_of(moment) for field, moment in narrow.items()}


def convert_moments(
    state: Any, name: str, old_policy: Policy, new_policy: Policy, seed: int
) -> Any:
    """Convert an optimizer's state from the storage of one policy to another's."""
    # By way of FP32, which holds every stored moment, so that each is rounded once.
    wide = optim.wide_state(state, fields=storage_by_field(name, old_policy, state))
    return optim.narrow_state(
        wide, seed=seed, fields=storage_by_field(name, new_policy, state)
    )
