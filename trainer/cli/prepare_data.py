"""Tokenize text into a prepared directory.

    scalify-trainer prepare-data
    scalify-trainer prepare-data files books/ dump.parquet
    scalify-trainer prepare-data text 'books/*.txt' --tokenizer gpt2
    scalify-trainer prepare-data jsonl 'dump/*.jsonl' --column body
    scalify-trainer prepare-data hub HuggingFaceFW/fineweb --config sample-10BT \\
        --streaming --max-tokens 1000000000
    scalify-trainer prepare-data verify runs/data/DIRECTORY

Without a source it takes the embedded corpus; `files` reads each file by its suffix;
`verify` reads every shard of a prepared directory. Train on the result with `python -m
trainer data=prepared data.prepared_dir=DIRECTORY`. After an interruption the same
command continues.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data import (
    EmbeddedSource,
    HubSource,
    Manifest,
    PythonSource,
    Source,
    TextSource,
    prepare,
)
from trainer.data.files import NotText
from trainer.errors import UserError, complain, run_and_flush
from trainer.observe.preparing import show_progress


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--tokenizer",
        default="byte",
        help="byte, gpt2, any tiktoken name, or a file (default: byte)",
    )
    common.add_argument(
        "--cache-dir", type=Path, default=Path("runs/data"), help="default: runs/data"
    )
    common.add_argument(
        "--val-fraction",
        type=float,
        default=0.1,
        help="share of the validation part (default: 0.1)",
    )
    common.add_argument("--workers", type=int, help="threads (default: all cores)")
    top = argparse.ArgumentParser(
        prog="scalify-trainer prepare-data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sources = top.add_subparsers(
        dest="source", metavar="{embedded,python,files,text,jsonl,parquet,hub,verify}"
    )
    add_sources(sources, common)
    verify = sources.add_parser("verify", help="check a prepared directory thoroughly")
    verify.add_argument("directory", type=Path)
    return top


def add_sources(sources: Any, common: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of source, with the arguments of `common`.

    `source_of` reads the result.
    """
    limit = argparse.ArgumentParser(add_help=False)
    limit.add_argument(
        "--column", default="text", help="the column of the text (default: text)"
    )
    limit.add_argument("--max-documents", type=int, help="stop after this many")
    sources.add_parser(
        "embedded",
        parents=[common],
        help="the corpus that is installed with the trainer",
    )
    sources.add_parser(
        "python", parents=[common], help="the standard library of this Python"
    )
    for format in ("files", "text", "jsonl", "parquet"):
        about = f"{format} files"
        if format == "files":
            about = "text, jsonl and parquet files, by their suffix"
        files = sources.add_parser(format, parents=[common, limit], help=about)
        files.add_argument("paths", nargs="+", help="files, globs or directories")
    hub = sources.add_parser(
        "hub", parents=[common, limit], help="a data set of the Hugging Face hub"
    )
    hub.add_argument("name", help="organization/name")
    hub.add_argument("--config", help="its configuration")
    hub.add_argument("--split", default="train", help="default: train")
    hub.add_argument("--revision", help="commit, to pin")
    hub.add_argument(
        "--streaming",
        action="store_true",
        help="do not download everything first; needs a maximum",
    )
    hub.add_argument(
        "--max-tokens", type=int, help="stop after the document that reaches this many"
    )


def source_of(args: argparse.Namespace) -> Source:
    """Return the source that the command line names."""
    if args.source == "hub":
        fields = (
            "name",
            "config",
            "split",
            "column",
            "revision",
            "streaming",
            "max_documents",
            "max_tokens",
        )
        return HubSource(**{field: getattr(args, field) for field in fields})
    if args.source == "embedded":
        return EmbeddedSource()
    if args.source == "python":
        return PythonSource()
    format = None if args.source == "files" else args.source
    return TextSource(tuple(args.paths), format, args.column, args.max_documents)


def describe(manifest: Manifest) -> list[str]:
    """Return counts by split, the tokenizer and the directory, in lines."""
    lines = [
        f"{name}: {split.documents:,} documents, {split.tokens:,} tokens,"
        f" {split.bytes:,} bytes of text, {len(split.shards)} shards"
        for name, split in manifest.splits.items()
    ]
    if manifest.skipped:
        lines.append(f"skipped: {manifest.skipped:,} empty documents")
    lines.append(
        f"tokenizer: {manifest.tokenizer}, {manifest.vocab_size:,} ids"
        f" ({manifest.dtype})"
    )
    return [*lines, f"directory: {manifest.directory}"]


def main(argv: Sequence[str]) -> int:
    """Run, and return 0, 2 after a UserError, or 130 after Ctrl-C."""
    args = parser().parse_args(argv or ["embedded"])
    try:
        if args.source == "verify":
            manifest = Manifest.load(args.directory, thorough=True)
        else:
            with show_progress() as progress:
                directory = prepare(
                    source_of(args),
                    args.tokenizer,
                    args.cache_dir,
                    val_fraction=args.val_fraction,
                    workers=args.workers,
                    progress=progress,
                )
            manifest = Manifest.load(directory)
    except UserError as error:
        complain(error.in_arguments() if isinstance(error, NotText) else error)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; re-run the same command to continue", file=sys.stderr)
        return 130
    print("\n".join(describe(manifest)))
    return 0


def command(argv: Sequence[str]) -> int:
    """Run with the arguments, and return the exit code."""
    logging.getLogger("trainer").setLevel(logging.INFO)
    logging.getLogger("trainer").addHandler(logging.StreamHandler())
    return run_and_flush(lambda: main(argv))
