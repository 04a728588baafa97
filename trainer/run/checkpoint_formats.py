"""Checkpoint formats, and how the manifest of an older one is read.

4: configuration keys and state fields have their current names.
3: they have the old names of `trainer.config.renamed` and of RENAMED_FIELDS, and no
totals. Arrays and their order are the same.
"""

from collections.abc import Mapping
from typing import Any

from trainer.config.fields import completed, from_saved
from trainer.config.renamed import renamed_keys
from trainer.config.schema import Config
from trainer.precision.policy import Policy

FORMAT = 4
READABLE = (3, FORMAT)
# Fields of `TrainState`: the first part of the names of their leaves.
RENAMED_FIELDS = {"local": "diloco", "lost": "kahan_compensation"}
STORED_AS = "stored_as"


def as_current(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest of any readable format in the current one.

    A leaf whose name has changed gets the key STORED_AS: its name among the stored
    arrays.
    """
    if manifest["format"] == FORMAT:
        return {**manifest, "meta": _with_new_keys(manifest["meta"])}
    leaves = {}
    for name, leaf in manifest["leaves"].items():
        field, slash, rest = name.partition("/")
        new = RENAMED_FIELDS.get(field, field) + slash + rest
        leaves[new] = leaf if new == name else {**leaf, STORED_AS: name}
    return {
        **manifest,
        "format": FORMAT,
        "meta": _with_new_keys(_with_current_keys(manifest["meta"], manifest["step"])),
        "leaves": leaves,
    }


def stored_name(name: str, leaves: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name under which the array of a leaf is stored; `leaves` are those of
    a current manifest.
    """
    return str(leaves[name].get(STORED_AS, name)) if name in leaves else name


def _with_new_keys(meta: Any) -> Any:
    """Return metadata whose precision has the keys that it was saved without."""
    if not isinstance(meta, Mapping) or "precision" not in meta:
        return meta
    return {**meta, "precision": completed(Policy, meta["precision"])}


def _with_current_keys(meta: Mapping[str, Any], step: int) -> dict[str, Any]:
    current = dict(meta)
    if "config" in meta:
        current["config"] = renamed_keys(meta["config"])
        tokens = step * from_saved(Config, meta["config"]).trained_tokens
        current["totals"] = {"tokens": tokens}
    # the fields of the policy, which are keys of the group `precision`
    if "precision" in meta:
        current["precision"] = renamed_keys({"precision": meta["precision"]})[
            "precision"
        ]
    return current
