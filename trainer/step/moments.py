"""How an optimiser's moments are stored: what its entry in `optimizers` says of them,
as the policy asks for it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from scalify_core import FloatFormat, optim
from scalify_core.formats import FP32
from scalify_core.stacks import NONE as NO_STACKS
from scalify_core.stacks import Stacks
from trainer.errors import UserError
from trainer.precision.fields import DTYPES
from trainer.precision.policy import Policy
from trainer.step.optimizers import ENTRIES, KEYS, Moment, Optimizer, check_moments


def store_moments(
    tx: optax.GradientTransformation, name: str, policy: Policy, seed: Any
) -> optax.GradientTransformationExtraArgs:
    """The optimiser `tx`, called `name`, with its moments stored and its update
    computed as the policy says.

    Args:
      tx: the optimiser; its first state is checked against its entry.
      name: its entry.
      policy: the precision.
      seed: of the stochastic rounding, an integer or an integer scalar.

    Raises:
      UserError: the policy asks for what the optimiser does not have; from `init`: the
        entry does not say of a part of the state how it is stored.
    """
    settings = moment_settings(name, policy)

    def init(params: Any) -> Any:
        state = tx.init(params)
        check_entry(name, ENTRIES[name], state)
        return state

    checked = tx._replace(init=init)
    if policy.propagated_update:
        formats = {field: how.format for field, how in settings["fields"].items()}
        return optim.propagated_state(
            checked, fields=formats, compute=DTYPES[policy.compute]
        )
    return optim.scaled_state(checked, seed=seed, **settings)


def stacks_of(params: Any, roles: Any, name: str, policy: Policy) -> Stacks:
    """The small parameters, of all or of their shapes, that the optimiser `name` may
    update together.

    None where it looks at whole arrays, and where nothing is rounded: what is then done
    to one is little, and the same program for all of a shape.
    """
    is_narrow = policy.weights != "fp32" or any(
        getattr(policy, key) != "fp32" for key in KEYS
    )
    if not (ENTRIES[name].elementwise and is_narrow) or policy.propagated_update:
        return NO_STACKS
    # on which the decay depends
    return Stacks.of(params, jax.tree.map(lambda role: role.is_matrix, roles))


def check_entry(name: str, entry: type[Optimizer], state: Any) -> None:
    """Raise UserError where floating-point fields of an optimiser's state are not those
    that its entry says it has.
    """
    found = set()
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(x.dtype, jnp.floating):
            fields = [
                key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)
            ]
            found.add(fields[-1] if fields else jax.tree_util.keystr(path))
    moments = {moment.field for moment in entry.moments}
    for field in sorted(found - moments - set(entry.unstored)):
        raise UserError(
            f"optimizer={name} keeps {field!r} in its state, of which its entry"
            f" {entry.__name__} in trainer.step.optimizers says nothing; add it to"
            " `moments`, or to `unstored`"
        )
    for field in sorted(moments - found):
        raise UserError(
            f"optimizer={name} has no {field!r} in its state, which its entry"
            f" {entry.__name__} in trainer.step.optimizers names among its `moments`;"
            f" there are {', '.join(sorted(found)) or 'none'}"
        )


def moment_settings(name: str, policy: Policy) -> dict[str, Any]:
    """How `scalify_core.optim` stores the moments of the optimiser `name`: its argument
    `fields`.

    Raises UserError as `check_moments` does.
    """
    check_moments(name, policy)
    formats = {key: FloatFormat.parse(getattr(policy, key)) for key in KEYS}
    narrow = {
        moment.field: (moment, formats[moment.key])
        for moment in ENTRIES[name].moments
        if formats[moment.key] is not FP32
    }
    # whose moments are scaled arrays anyway, and rounded to nearest
    if policy.propagated_update:
        return {
            "fields": {
                field: optim.Stored(fmt, rounding="nearest")
                for field, (_, fmt) in narrow.items()
            }
        }

    def stored(moment: Moment, fmt: FloatFormat) -> optim.Stored:
        rounding: Any = policy.moments_rounding
        if rounding == "auto":
            rounding = (
                "nearest"
                if fmt.mantissa_bits >= 10 and not moment.root
                else "stochastic"
            )
        relative = (
            moment.relative_to
            if moment.relative_to in narrow and fmt.mantissa_bits <= 3
            else None
        )
        return optim.Stored(
            fmt, sqrt=moment.root, rounding=rounding, relative_to=relative
        )

    return {"fields": {field: stored(*how) for field, how in narrow.items()}}


def convert_moments(
    state: Any, name: str, source: Policy, policy: Policy, seed: int
) -> Any:
    """An optimiser's state stored for one policy as it is stored for another."""
    wide = optim.wide_state(state, **moment_settings(name, source))
    return optim.narrow_state(wide, seed=seed, **moment_settings(name, policy))
