"""Tokenize text into a prepared directory.

    scalify-trainer prepare-data
    scalify-trainer prepare-data data=text 'data.paths=[books/,dump.parquet]'
    scalify-trainer prepare-data data=text 'data.paths=[a.jsonl]' \\
        data.column=body
    scalify-trainer prepare-data data=hf data.name=HuggingFaceFW/fineweb \\
        data.config=sample-10BT data.streaming=true data.max_tokens=1000000000
    scalify-trainer prepare-data verify=runs/data/DIRECTORY

Takes the data keys of training. Training prepares its text itself; use this command to
prepare it in advance, or on another machine. Train on the result with data=prepared
data.prepared_dir=DIRECTORY. After an interruption the same command continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.cli.arguments import argument
from trainer.config.composition import compose_config
from trainer.config.schema import Data
from trainer.data import Manifest
from trainer.data.json_tokenizer import JSONTokenizer
from trainer.errors import UserError
from trainer.text import plural, show


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    verify: str = argument(
        "verify every shard of this prepared directory; nothing is prepared", ""
    )


def describe(manifest: Manifest) -> list[str]:
    """Return lines with counts by split, the tokenizer and the directory."""
    lines = [
        f"{name}: {plural(split.documents, 'document')}, {split.tokens:,} tokens"
        f"{unknown_share(manifest, name)}, {split.bytes:,} bytes of text,"
        f" {plural(len(split.shards), 'shard')}"
        for name, split in manifest.splits.items()
    ]
    if manifest.skipped:
        lines.append(f"skipped: {plural(manifest.skipped, 'empty document')}")
    lines.append(
        f"tokenizer: {manifest.tokenizer}, {manifest.vocab_size:,} ids"
        f" ({manifest.dtype})"
    )
    return [*lines, f"directory: {manifest.directory}"]


def unknown_share(manifest: Manifest, split: str) -> str:
    """Return ` (2.5% unknown)`, or nothing if no token of a split is unknown."""
    tokenizer = manifest.get_tokenizer()
    # A byte-level tokenizer has no unknown token. Some name their end of text as one;
    # its count would be that of the documents.
    unknown = tokenizer.unknown if isinstance(tokenizer, JSONTokenizer) else None
    if unknown in (None, tokenizer.eot):
        return ""
    shards = manifest.open(split)
    count = sum(int(np.count_nonzero(shard == unknown)) for shard in shards)
    if not count:
        return ""
    return f" ({count / manifest.token_count(split):.2%} unknown)"


def text_settings(overrides: Sequence[str]) -> Data:
    """Return the settings of the data. Raises UserError for a source without a text."""
    data = compose_config(overrides).data
    # A mixture's sources are prepared one by one, each by this command.
    if data.source in ("prepared", "mix"):
        raise UserError(
            f"data={data.source} has no text to tokenize; valid: data=text, hf,"
            " embedded or python"
        )
    return data


def main(args: Arguments, overrides: Sequence[str]) -> None:
    """Prepare or verify, and describe the directory."""
    if args.verify:
        # `verify` would ignore them, and look as if it had prepared their text.
        if overrides:
            raise UserError(
                f"verify={args.verify} takes no other keys; remove"
                f" {' '.join(overrides)}"
            )
        manifest = Manifest.load(Path(args.verify), thorough=True)
        manifest.get_tokenizer()  # raises UserError if not that of the manifest
    else:
        manifest = prepare_text(text_settings(overrides))
    show("\n".join(describe(manifest)))


def prepare_text(data_config: Data) -> Manifest:
    """Prepare the text, and return the manifest."""
    from trainer.assembly.data import build_source
    from trainer.data import prepare
    from trainer.observe.preparing import show_progress

    # `text_settings` refuses the sources for which these are null.
    assert data_config.tokenizer is not None
    assert data_config.cache_dir is not None
    assert data_config.val_fraction is not None
    with show_progress() as progress:
        directory = prepare(
            build_source(data_config),
            data_config.tokenizer,
            Path(data_config.cache_dir),
            val_fraction=data_config.val_fraction,
            workers=data_config.workers,
            progress=progress,
        )
    # Read again from the disk, so that the lines tell what is there.
    return Manifest.load(directory)
