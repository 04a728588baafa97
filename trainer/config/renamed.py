"""Renamed configuration keys: one table for the command line, sweeps and saved runs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import UserError

# Checkpoint format 4 and later have the names on the right. No new key may have a name
# on the left.
RENAMED_KEYS = {
    "train.accum": "train.grad_accum_steps",
    "sample.max_new": "sample.max_new_tokens",
    "precision.matmuls": "precision.fp8_modules",
    "precision.keep": "precision.exclude",
    "parallel.local": "diloco.replicas",
    "parallel.local_steps": "diloco.sync_every",
    "parallel.local_reduce": "diloco.outer_grad",
    "parallel.local_lr": "diloco.outer_lr",
    "parallel.local_momentum": "diloco.outer_momentum",
    "parallel.local_feedback": "diloco.error_feedback",
    "parallel.local_fragments": "diloco.fragments",
    "parallel.local_participants": "diloco.participants",
    "parallel.local_data": "diloco.data",
    "parallel.local_quorum": "diloco.quorum",
    "parallel.local_gbps": "diloco.bandwidth_gbps",
}
RENAMED_CHOICES = {"parallel=local": "parallel=diloco"}


def check_key_names(overrides: Sequence[str]) -> None:
    """Raise UserError with the new name if an override has an old one."""
    for override in overrides:
        key, equals, value = override.partition("=")
        # Hydra's + and ~ belong to the override that the message suggests.
        prefix = key[: len(key) - len(key.lstrip("+~"))]
        new = new_name(key.lstrip("+~"))
        if new is not None:
            raise UserError(
                f"{override}: this key was renamed; use {prefix}{new}{equals}{value}"
            )
        if override in RENAMED_CHOICES:
            raise UserError(
                f"{override}: this choice was renamed; use {RENAMED_CHOICES[override]}"
            )


def new_name(key: str) -> str | None:
    """Return the new name of a dotted key, also inside `train.phases`.

    None: it was not renamed.
    """
    # Phases are a list, so a key in one has an index that the table lacks.
    phase = re.match(r"train\.phases\[\d+\]\.", key)
    prefix = phase[0] if phase else ""
    new = RENAMED_KEYS.get(key.removeprefix(prefix))
    if new is None:
        return None
    return prefix + new


def renamed_keys(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved configuration with the current names of all keys.

    Raises UserError for a key that is there by both names.
    """
    tree = _with_new_names(saved)
    train = tree.get("train")
    if isinstance(train, dict) and isinstance(train.get("phases"), list | tuple):
        # A phase may have its own precision.
        train["phases"] = [
            _with_new_names(p) if isinstance(p, Mapping) else p for p in train["phases"]
        ]
    return tree


def _with_new_names(groups: Mapping[str, Any]) -> dict[str, Any]:
    tree = {
        group: dict(keys) if isinstance(keys, Mapping) else keys
        for group, keys in groups.items()
    }
    for old, new in RENAMED_KEYS.items():
        old_group, old_key = old.split(".")
        new_group, new_key = new.split(".")
        keys = tree.get(old_group)
        if not isinstance(keys, dict) or old_key not in keys:
            continue
        # An old run has no group `diloco`.
        new_keys = tree.setdefault(new_group, {})
        if isinstance(new_keys, dict):
            if new_key in new_keys:
                raise UserError(
                    f"{old} is the old name of {new}, which is there too; leave {old}"
                    " out"
                )
            new_keys[new_key] = keys.pop(old_key)
    return tree
