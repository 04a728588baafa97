"""Checkpoint formats, and how the manifest of an older one is read.

4: configuration keys and state fields have their current names.
3: they have the old names of `trainer.config.renamed` and of RENAMED_FIELDS, and there
are no totals. Arrays and their order are as in format 4.
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
    """Return a manifest of any readable format in the current format.

    A leaf whose name has changed gets the key STORED_AS: its name among the stored
    arrays.
    """
    meta = manifest["meta"]
    if manifest["format"] == FORMAT:
        return {**manifest, "meta": _add_missing_precision_keys(meta)}
    # Arrays stay in their files under the old names.
    leaves = {}
    for name, leaf in manifest["leaves"].items():
        field, slash, rest = name.partition("/")
        new_name = RENAMED_FIELDS.get(field, field) + slash + rest
        leaves[new_name] = leaf if new_name == name else {**leaf, STORED_AS: name}
    return {
        **manifest,
        "format": FORMAT,
        "meta": _add_missing_precision_keys(_upgrade_format_3(meta, manifest["step"])),
        "leaves": leaves,
    }


def _add_missing_precision_keys(meta: Any) -> Any:
    """Return metadata with null for precision keys that did not exist when it was
    saved.
    """
    if not isinstance(meta, Mapping) or "precision" not in meta:
        return meta
    return {**meta, "precision": completed(Policy, meta["precision"])}


def _upgrade_format_3(meta: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the metadata of format 3 with current key names, and with totals."""
    current = dict(meta)
    if "config" in meta:
        current["config"] = renamed_keys(meta["config"])
        # Format 3 counted no tokens. This is exact unless an earlier fork had another
        # batch size.
        tokens = step * from_saved(Config, meta["config"]).trained_tokens
        current["totals"] = {"tokens": tokens}
    if "precision" in meta:
        current["precision"] = renamed_keys({"precision": meta["precision"]})[
            "precision"
        ]
    return current
