"""Train a byte-level BPE tokenizer on text, for `data.tokenizer=DIRECTORY`.

    scalify-trainer train-tokenizer files books/ --vocab-size 8192 --out mine
    scalify-trainer train-tokenizer embedded --vocab-size 2048 --out small
    scalify-trainer train-tokenizer hub HuggingFaceFW/fineweb --streaming \\
        --max-documents 10000 --vocab-size 32768 --out web

Sources are those of prepare-data. The same text gives the same tokenizer. The
directory has Hugging Face's tokenizer.json and tokenizer_config.json, which
`transformers.AutoTokenizer` reads too.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.cli.prepare_data import add_sources, source_of
from trainer.data import HubSource, PreparedSource, Source
from trainer.data.bpe_files import known_settings
from trainer.data.corpus import open_corpus
from trainer.data.files import NotText
from trainer.data.hf_tokenizer import FILE, byte_level, save_hf, split_by
from trainer.data.preparation import training_part
from trainer.data.tokenizer import Tokenizer, cut_at_lines, get_tokenizer
from trainer.errors import UserError, complain, run_and_flush

PATTERNS = ("gpt2", "cl100k_base", "o200k_base")
END = "<|endoftext|>"
SMALLEST = 257  # every byte, and the end of a document
PIECE = 1 << 20  # characters that are split into words at a time


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--vocab-size",
        type=int,
        required=True,
        help="tokens, the end of a document included",
    )
    common.add_argument(
        "--out", type=Path, required=True, help="directory to write to; made if absent"
    )
    common.add_argument(
        "--pattern",
        choices=PATTERNS,
        default="gpt2",
        help="whose word pattern (default: gpt2)",
    )
    common.add_argument("--max-chars", type=int, help="read at most this much text")
    common.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        help="leave out the validation text of data.val_fraction=F (default: 0)",
    )
    common.add_argument(
        "--cache-dir", type=Path, default=Path("runs/data"), help="default: runs/data"
    )
    top = argparse.ArgumentParser(
        prog="scalify-trainer train-tokenizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sources(top.add_subparsers(dest="source", required=True), common)
    return top


def texts_of(
    source: Source, cache_dir: Path, most: int | None, val_fraction: float
) -> Iterator[str]:
    """Yield the documents of the training part, or pieces of a long one.

    They have at most `most` characters in all.
    """
    assert not isinstance(source, PreparedSource)
    corpus = open_corpus(source, cache_dir)
    left = most if most is not None else sys.maxsize
    every = (text for rows in corpus.read(None) for text in rows.texts)
    for text in training_part(corpus, val_fraction) if val_fraction else every:
        for piece in cut_at_lines(text, PIECE):
            if left <= 0:
                return
            yield piece[:left]
            left -= len(piece)


class Counted:
    """An iterator of texts that counts their bytes."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.texts, self.bytes = texts, 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.bytes += len(text.encode())
            yield text


def train_bpe(texts: Iterator[str], vocab_size: int, pattern: str) -> str:
    """Return the tokenizer.json of a byte-pair encoding, by package `tokenizers`."""
    from tokenizers import AddedToken, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as HFTokenizer

    words = split_by(
        known_settings(pattern if pattern != "gpt2" else "r50k_base", {})["pat_str"]
    )
    tree = json.loads(HFTokenizer(models.BPE()).to_str())
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [words, byte_level()]}
    tokenizer = HFTokenizer.from_str(json.dumps(tree))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def train(texts: Iterator[str], vocab_size: int, pattern: str, out: Path) -> Tokenizer:
    """Train a tokenizer and write it to a directory.

    Raises:
      UserError: a vocabulary smaller than the bytes, or a directory with a tokenizer.
    """
    if vocab_size < SMALLEST:
        raise UserError(
            f"--vocab-size {vocab_size}: expected {SMALLEST} (every byte, and {END}) or"
            " more"
        )
    if (out / FILE).exists():
        raise UserError(f"{out / FILE} exists; choose another --out, or remove it")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / FILE
        file.write_text(train_bpe(texts, vocab_size, pattern), encoding="utf-8")
        tokenizer = get_tokenizer(str(file))
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_hf(out, tokenizer, None)
    except OSError as error:
        raise UserError(
            f"--out {out}: {error.strerror}; choose another directory"
        ) from error
    return tokenizer


def main(argv: Sequence[str]) -> int:
    """Run, and return 0, 2 after a UserError, or 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        source = source_of(args)
        if isinstance(source, HubSource) and source.max_tokens is not None:
            raise UserError(
                "--max-tokens: there are no tokens yet; bound the text by"
                " --max-documents or --max-chars"
            )
        if not 0 <= args.val_fraction < 1:
            raise UserError(
                f"--val-fraction {args.val_fraction}: expected a number from 0 to below"
                " 1, such as 0.1"
            )
        texts = Counted(
            texts_of(source, args.cache_dir, args.max_chars, args.val_fraction)
        )
        tokenizer = train(iter(texts), args.vocab_size, args.pattern, args.out)
    except UserError as error:
        complain(error.in_arguments() if isinstance(error, NotText) else error)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    fewer = ""
    if tokenizer.vocab_size < args.vocab_size:
        fewer = ": the text has no more pairs"
    print(f"{tokenizer.vocab_size:,} tokens from {texts.bytes:,} bytes of text{fewer}")
    print(f"wrote {args.out}; train with it: data.tokenizer={args.out}")
    return 0


def command(argv: Sequence[str]) -> int:
    """Run with the arguments, and return the exit code."""
    logging.getLogger("trainer").setLevel(logging.INFO)
    logging.getLogger("trainer").addHandler(logging.StreamHandler())
    return run_and_flush(lambda: main(argv))
