"""Check that all processes of a run read the same data, weights and checkpoint.

Each machine may have a different file at the same path.
"""

import hashlib
import json
from pathlib import Path

import jax

from trainer.config.schema import Config
from trainer.data.dataset import Dataset
from trainer.files import path_of, read_file, saved_steps
from trainer.models.weight_files import CONFIG, TOKENIZER_BYTES, TOKENIZER_FILES
from trainer.parallel.processes import check_same_content
from trainer.run.checkpoint_manifest import manifest_file


def check_same_inputs(c: Config, data: Dataset) -> None:
    """Raise UserError in all processes if one reads other data, weights or checkpoints.

    Otherwise each process could train on different data, or an array could be assembled
    from shards of different checkpoints.
    """
    if jax.process_count() == 1:
        return
    manifest = data.manifest
    # A data set of the Hub keeps its fingerprint when its content changes.
    content = [manifest.fingerprint, manifest.content, data.tokenizer.fingerprint]
    inputs = {"the data": json.dumps(content)}
    if c.init_from is not None:
        inputs["init_from"] = input_digest(path_of(c.init_from))
    # The own checkpoints need no comparison: `RunDir` has checked that all processes
    # have the same directory.
    if c.resume.source not in ("auto", "none"):
        inputs["resume"] = input_digest(path_of(c.resume.source), c.resume.step)
    check_same_content(inputs)


def input_digest(source: Path, step: int | None = None) -> str:
    """Return a digest that identifies a run's checkpoint, or a directory of weights.

    It is the digest of the checkpoint's manifest, or of the small files beside the
    weights: their configuration and tokenizer. `step` None: the newest checkpoint.
    """
    steps = saved_steps(source)
    if steps:
        step = steps[-1] if step is None else step
        # A manifest has the checksum of every array, so no array needs to be read.
        files = [manifest_file(source / "checkpoints" / str(step))]
    else:
        folder = source if source.is_dir() else source.parent
        # The weights themselves are compared in memory, by `check_weights_finite`.
        files = [folder / name for name in (CONFIG, *TOKENIZER_FILES)]
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        if file.is_file():
            # With the name, since one file may be missing here and another one there.
            digest.update(file.name.encode())
            digest.update(read_file(file, TOKENIZER_BYTES))
    return digest.hexdigest()
