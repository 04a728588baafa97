"""The metadata of a checkpoint, validated when it is read.

A checkpoint may come from somebody else, who can give any content a valid digest. So
each value has a type with bounds in FIELDS, as a configuration's values have, and no
other module reads metadata before it is validated.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp

from trainer.bounds import Natural, Positive, annotations
from trainer.config.fields import converted, from_saved, from_tree
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.files import (
    MAX_EXPANSION,
    TEXT_BYTES,
    parse_json,
    well_formed,
)
from trainer.models.registry import SPECS
from trainer.observe.records import is_row
from trainer.precision.policy import Policy
from trainer.run.ocdbt import check_index
from trainer.run.totals import Totals
from trainer.run.watchdog import WatchdogState

MAX_ITEMSIZE = 16  # bytes, of complex128
ADVICE = "use another checkpoint, or an intact copy"


@dataclass(frozen=True)
class Fork:
    """The checkpoint of another run from which a run was forked."""

    run: str
    step: Natural


@dataclass(frozen=True)
class Leaf:
    """An array of the state; `stored_as` is its name in an older format."""

    shape: tuple[Natural, ...]
    dtype: str
    checksum: str
    impl: Literal["threefry2x32", "rbg", "unsafe_rbg"] | None = None
    stored_as: str | None = None


STRINGS: Any = tuple[str, ...] | None
# A key that is missing here is taken as it is, whoever wrote it.
FIELDS: dict[str, Any] = {
    "config": dict,
    "model": dict,
    "precision": Policy,
    "trainable": STRINGS,
    # tokens that a matmul of a linear layer takes at once; see `Model.rows`
    "rows": Positive | None,
    # sequences of a validation batch; None: saved by an earlier version
    "validation_rows": Positive | None,
    "data": str,
    "data_content": str | None,
    "tokenizer": str,
    "tokenizer_fingerprint": str | None,
    "devices": str,
    "settings": dict | None,
    "tracker_id": str | None,
    "forked": Fork | None,
    "watchdog": WatchdogState | None,
    "unfinished": str | None,
    "log": dict | None,
    "totals": Totals,
    "schedule_changes": STRINGS,
}


class Metadata(dict[str, Any]):
    """The metadata of a checkpoint; a key that it lacks is a UserError."""

    def __or__(self, other: Mapping[str, Any]) -> "Metadata":  # type: ignore[override]
        return Metadata({**self, **other})

    def __missing__(self, key: str) -> NoReturn:
        raise UserError(f"the checkpoint's metadata has no {key!r}; {ADVICE}")


def validate_metadata(
    meta: Mapping[str, Any], leaves: Mapping[str, Any], where: str
) -> tuple[Metadata, dict[str, Any]]:
    """Return metadata and descriptions of arrays, once all values have been validated.

    Args:
      meta: the `meta` of `Checkpointer.save`.
      leaves: description of each array by name.
      where: the checkpoint, for messages.

    Raises:
      UserError: a value has a wrong type or is out of bounds, or the arrays are too
        small for the model that the metadata describes.
    """
    with well_formed(where, ADVICE):
        try:
            for key, hint in FIELDS.items():
                # Missing keys pass: earlier versions lack some, and Metadata names one
                # that is needed.
                if key in meta:
                    converted(hint, meta[key], key)  # raises if it is invalid
            # The row is a text in a text, so its type says nothing about the content.
            row = meta.get("unfinished")
            if row is not None and not _is_step_row(parse_json(row)):
                raise ValueError("its unfinished row is no row of a step")
            for name, leaf in leaves.items():
                _check_leaf(name, leaf)
            result = Metadata(meta)
            if "model" in meta:
                result["model"] = Metadata(meta["model"])
                _check_model(meta, leaves)
        except UserError as error:
            raise UserError(f"{where}: {error}; {ADVICE}") from error
    return result, dict(leaves)


def _is_step_row(row: Any) -> bool:
    # An event has no loss. That of a skipped step is NaN, which stands there as text.
    return is_row(row) and "train/loss" in row


def _check_leaf(name: str, leaf: Any) -> None:
    dtype = from_tree(Leaf, leaf, name).dtype
    # NumPy knows no dtype of keys.
    is_random_key = dtype.startswith("key<")
    # O, S, U, m, M: objects, bytes, texts, spans of time and dates.
    if not is_random_key and jnp.dtype(dtype).kind in "OSUmM":
        raise ValueError(f"{name} is {dtype}, which is no format of numbers")


def _check_model(meta: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Raise UserError if a model size is out of bounds, or if the arrays hold fewer
    numbers than a model of these sizes has parameters.
    """
    model = meta["model"]
    # They decide how large a model is built before an array is read.
    settings = meta.get("config", {}).get("model", {})
    family = model.get("family")
    if family not in SPECS:
        return  # a custom model
    hints = annotations(SPECS[family])
    for key in model.keys() & hints.keys():
        converted(hints[key], model[key], f"model.{key}")
    # The bounds hold for `model`, but the model is built from the configuration.
    for key in ("n_layer", "d_model"):
        if key in settings and settings[key] != model.get(key):
            raise UserError(
                f"its configuration has {key}={settings[key]}, its model"
                f" {model.get(key)}"
            )
    layers, width, ids = (
        model.get(key, 0) for key in ("n_layer", "d_model", "vocab_size")
    )
    numbers = sum(math.prod(leaf["shape"]) for leaf in leaves.values())
    # A layer has at least one norm; its heads and MLP may have any width.
    min_parameters = (layers + ids) * width
    # Unrolled, each layer has at least one array.
    is_scanned = bool(settings.get("scan_layers"))
    if min_parameters > numbers or (layers > len(leaves) and not is_scanned):
        raise UserError(
            f"{layers:,} layers of width {width:,} and {ids:,} ids have at least"
            f" {min_parameters:,} parameters, but its {len(leaves):,} arrays hold"
            f" {numbers:,} numbers"
        )


def saved_config(meta: Mapping[str, Any]) -> Config:
    """Return the configuration of a checkpoint; raise UserError if it is malformed."""
    with well_formed("the configuration in the checkpoint", ADVICE):
        config: Config = from_saved(Config, meta["config"])
    return config


def saved_policy(meta: Mapping[str, Any]) -> Policy:
    """Return the precision in which a checkpoint was saved."""
    policy: Policy = from_tree(Policy, meta["precision"], "precision")
    return policy


def saved_trainable(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `train.trainable` of a checkpoint; empty: all parameters."""
    return tuple(meta["trainable"] or ())


def check_chunks(folder: Path, names: Iterable[str]) -> None:
    """Check that no stored array has chunks larger than itself, before it is read.

    TensorStore decodes whole chunks, and the array's own metadata gives their size, so
    a small file could fill the memory. The index of the arrays is checked first. A list
    of the arrays is not read: it could be as large.

    Args:
      folder: that of a checkpoint's arrays, in the formats that `Checkpointer` writes:
        zarr 2 inside of OCDBT.
      names: those of the arrays that are to be read.

    Raises:
      UserError: a chunk is larger than its array, its elements are larger than any
        number, or an array is in another format.
      IndexTooLargeError: the index expands to more bytes than are stored.
      Exception: of any class, if the files are damaged.
    """
    import tensorstore

    # At least 64 MiB: in a small checkpoint names take more room than arrays.
    check_index(folder, max(TEXT_BYTES, _stored_bytes(folder)))
    base = {"driver": "file", "path": f"{folder.absolute()}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    for name in names:
        zarr_2, zarr_3 = f"{name}/.zarray", f"{name}/zarr.json"
        # Orbax's own metadata may name this format, whose chunks `.zarray` does not
        # bound.
        is_zarr_3 = store.read(zarr_3).result().state != "missing"
        if is_zarr_3 or not _fits_array(parse_json(store[zarr_2])):
            raise UserError(
                f"{folder}: the file {zarr_3 if is_zarr_3 else zarr_2} is not as the"
                f" trainer writes it; {ADVICE}"
            )


def _fits_array(description: Any) -> bool:
    """Return whether a `.zarray` has chunks within its array, and elements that are
    numbers.
    """
    sides = zip(description["chunks"], description["shape"], strict=True)
    return jnp.dtype(description["dtype"]).itemsize <= MAX_ITEMSIZE and all(
        chunk <= max(side, 1) for chunk, side in sides
    )


def check_size(folder: Path, target: Any) -> None:
    """Raise UserError for arrays that are out of proportion to their stored bytes.

    A small file of compressed zeros can decode to more memory than there is.

    Args:
      folder: the checkpoint's.
      target: the tree of arrays, or of their shapes, to be restored.
    """
    array_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target))
    stored_bytes = _stored_bytes(folder)
    if array_bytes > max(TEXT_BYTES, MAX_EXPANSION * stored_bytes):
        raise UserError(
            f"{folder}: {stored_bytes:,} bytes are to hold {array_bytes:,} bytes of"
            f" arrays; {ADVICE}"
        )


def _stored_bytes(folder: Path) -> int:
    files = (file for file in folder.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)
