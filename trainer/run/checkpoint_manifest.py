"""The manifest of a checkpoint: its digest, and the validation loss that it has.

Orbax has the loss in a file of its own, by which the best checkpoint is kept. The
manifest, under its digest, decides which one is the best.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError
from trainer.files import parse_json, read_file, write_atomically

MANIFEST_DAMAGED = "its manifest is missing, unreadable or altered"
ROWS = "rows"


class CheckpointManifest(NamedTuple):
    """The description of a checkpoint.

    Attributes:
      step: steps taken.
      meta: the meta that was saved with it.
      leaves: shape, dtype and checksum of every leaf of the state, by name.
    """

    step: int
    meta: dict[str, Any]
    leaves: dict[str, Any]


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the digest of a manifest without its digest."""
    # The digest is of the values, not of the order of the keys in a file. A NaN is no
    # JSON and raises ValueError: such a manifest counts as damaged.
    text = json.dumps(document, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with the digest of its other values."""
    # A manifest that is completed has the digest of the one before.
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return {**content, "digest": digest_of(content)}


def manifest_file(folder: Path) -> Path:
    """Return Orbax's file of a checkpoint's manifest."""
    return folder / "manifest" / "metadata"


def intact_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint, without its digest.

    None: it is missing, unreadable or altered.
    """
    try:
        manifest: dict[str, Any] = parse_json(read_file(manifest_file(folder)))
        # A JSON value that is no object raises one of the errors below.
        is_intact = manifest.pop("digest") == digest_of(manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    # Somebody else can give a right digest to any content.
    has_meta = isinstance(manifest.get("meta"), dict)
    has_keys = {"step", "format"} <= manifest.keys()
    return manifest if is_intact and has_meta and has_keys else None


def orbax_metrics(folder: Path) -> dict[str, Any] | None:
    """Return the content of Orbax's file of the metrics.

    None: there is no file. A file that is damaged has the loss NaN.
    """
    try:
        metrics = parse_json(read_file(folder / "metrics" / "metrics"))
    except FileNotFoundError:
        return None
    except ValueError:
        metrics = {}
    # A loss that is an integer or a text was not written by a run.
    has_loss = isinstance(metrics, dict) and isinstance(metrics.get("val_loss"), float)
    return metrics if has_loss else {"val_loss": math.nan}


def metrics_of(manifest: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the metrics that Orbax stores; None: there was no validation."""
    if manifest["val_loss"] is None:
        return None
    rows = validation_rows(manifest)
    return {"val_loss": manifest["val_loss"]} | ({} if rows is None else {ROWS: rows})


def validation_rows(manifest: Mapping[str, Any]) -> int | None:
    """Return the sequences of a validation batch; None: an earlier version saved it."""
    # From the raw manifest: this runs before metadata are validated.
    rows = manifest.get("meta", {}).get("validation_rows")
    return rows if isinstance(rows, int) else None


def write_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Write Orbax's file of the metrics."""
    (folder / "metrics").mkdir(exist_ok=True)
    write_atomically(folder / "metrics" / "metrics", json.dumps(metrics))


def manifest_loss(folder: Path, manifest: Mapping[str, Any]) -> float | None:
    """Return the validation loss in a checkpoint's manifest; None: it has none.

    Manifests of earlier versions lack the key: then Orbax's file has the loss.
    """
    # With null there was no validation: a loss in Orbax's file is damage.
    metrics = orbax_metrics(folder) or {"val_loss": None}
    loss = manifest.get("val_loss", metrics["val_loss"])
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


class Validation(NamedTuple):
    """The validation of a checkpoint: step, loss in nats, and the sequences of a batch;
    None: an earlier version saved it.
    """

    step: int
    loss: float
    rows: int | None


def best_of(validations: Sequence[Validation]) -> int | None:
    """Return the step of the lowest loss, of equal ones the newest; None: there is no
    validation.

    On other devices a validation may read other rows of a short text. Only losses of
    the newest one's rows are compared.
    """
    if not validations:
        return None
    rows = max(validations, key=lambda v: v.step).rows
    # An earlier version did not say its rows: it is compared with all.
    comparable = [v for v in validations if rows is None or v.rows in (None, rows)]
    return min(comparable, key=lambda v: (v.loss, -v.step)).step


def is_planned(manifest: Mapping[str, Any] | None) -> bool:
    """Return whether a run that is never stopped has a checkpoint, too.

    Not if a stop request was the reason to save it, or interrupted the callbacks of its
    step. Manifests of earlier versions do not say the former.
    """
    # A manifest that cannot be read may be intact: its checkpoint is not removed for
    # it, and `restore` sets a damaged one aside.
    return manifest is None or (
        bool(manifest.get("planned", True))
        and manifest["meta"].get("unfinished") is None
    )


class Preservation(NamedTuple):
    """The policy by which Orbax keeps checkpoints.

    Of those that `is_planned`, it keeps the same whether or not the run was stopped.

    Attributes:
      keep: number of newest planned checkpoints; others are kept while there are fewer.
        The newest of all is always kept.
      keep_best: whether to keep the planned one of `best_of`, by `metrics_of`, too.
      is_planned: whether the checkpoint of a step is.
    """

    keep: int
    keep_best: bool
    is_planned: Callable[[int], bool]

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: object
    ) -> Sequence[bool]:
        """Return for each checkpoint, in the order of steps, whether it is kept."""
        # Orbax passes `context` by name, so it cannot be left out.
        del context
        steps = [info.step for info in checkpoints]
        planned = [step for step in steps if self.is_planned(step)]
        kept = {*planned[-self.keep :], *steps[-1:]}
        others = [step for step in steps if step not in kept and step not in planned]
        missing = self.keep - len(kept)
        if missing > 0:
            kept |= {*others[-missing:]}
        if self.keep_best:
            validations = [
                Validation(info.step, info.metrics["val_loss"], info.metrics.get(ROWS))
                for info in checkpoints
                if info.metrics and info.step in planned
            ]
            kept |= {best_of(validations)}
        return [step in kept for step in steps]


def best_step(directory: Path, steps: Iterable[int]) -> int | None:
    """Return the step of `best_of` by the manifests.

    Args:
      directory: that of the checkpoints.
      steps: those of its checkpoints, ascending.

    Raises:
      UserError: a manifest is damaged, and its checkpoint may be the best.
    """
    validations = []
    for step in steps:
        folder = directory / str(step)
        manifest = intact_manifest(folder)
        if manifest is None:
            # A run at work may have removed it since `steps` was read.
            check_not_removed(folder)
            raise UserError(
                f"checkpoint {step} is damaged ({MANIFEST_DAMAGED}), so that the best"
                f" one is not known; choose one by its step, or remove {folder}"
            )
        loss = manifest_loss(folder, manifest)
        if loss is not None:
            validations.append(Validation(step, loss, validation_rows(manifest)))
    return best_of(validations)


def check_not_removed(path: Path) -> None:
    """Raise UserError if another process has removed an unreadable checkpoint."""
    if not path.exists():
        raise UserError(
            f"{path} was removed while it was read, as a run at work removes old"
            " checkpoints; run the command again"
        )
