"""Train a byte-level BPE tokenizer on text, for `data.tokenizer=DIRECTORY`.

    scalify-trainer train-tokenizer data=text 'data.paths=[books/]' \\
        vocab_size=8192 out=mine
    scalify-trainer train-tokenizer vocab_size=2048 out=small
    scalify-trainer train-tokenizer data=hf data.name=HuggingFaceFW/fineweb \\
        data.streaming=true data.max_documents=10000 vocab_size=32768 out=web

Takes the keys of the group data, as training does, and reads the training part, which
leaves out the share data.val_fraction. The same text gives the same tokenizer. The
directory has Hugging Face's tokenizer.json and tokenizer_config.json, which
`transformers.AutoTokenizer` reads too.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.cli.arguments import argument, check_at_least
from trainer.cli.prepare_data import text_settings
from trainer.data import PreparedSource, Source
from trainer.data.byte_spelling import BYTE_LEVEL
from trainer.data.corpus import open_corpus
from trainer.data.hf_tokenizer import TOKENIZER_JSON, save_hf, split_by
from trainer.data.line_cuts import cut_at_lines
from trainer.data.preparation import training_part
from trainer.data.tokenizer import Tokenizer, get_tokenizer
from trainer.data.tokenizer_settings import SETTINGS
from trainer.data.word_patterns import ENCODINGS
from trainer.errors import UserError
from trainer.text import override, show

END = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # every byte, and the end of a document
# A longer text is split into words piece by piece.
PIECE_CHARS = 1 << 20


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    vocab_size: int = argument("tokens, the end of a document included")
    out: str = argument("directory to write to; made if absent")
    pattern: Literal["gpt2", "cl100k_base", "o200k_base"] = argument(
        "the tokenizer whose pattern cuts text into words", "gpt2"
    )
    all_text: bool = argument("read the validation part, too", False)
    max_chars: int | None = argument("maximum number of characters to read", None)


def texts_of(
    source: Source, cache_dir: Path, max_chars: int | None, val_fraction: float
) -> Iterator[str]:
    """Yield the documents of the training part, the long ones in pieces.

    Stop after `max_chars` characters. The training part is the whole text if
    `val_fraction` is 0.
    """
    assert not isinstance(source, PreparedSource)
    corpus = open_corpus(source, cache_dir)
    remaining = sys.maxsize if max_chars is None else max_chars
    # Without the validation part: words of a text that a tokenizer has seen cost fewer
    # tokens.
    if val_fraction:
        texts = training_part(corpus, val_fraction)
    else:
        texts = (text for batch in corpus.read(None) for text in batch.texts)
    for text in texts:
        for piece in cut_at_lines(text, PIECE_CHARS):
            if remaining <= 0:
                return
            # The limit holds for the whole text, not for each document.
            yield piece[:remaining]
            remaining -= len(piece)


class ByteCounter:
    """An iterator of texts that counts their bytes."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.texts, self.bytes = texts, 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            # Counted on the way, because the texts are read once, as a stream.
            self.bytes += len(text.encode())
            yield text


def train_bpe(texts: Iterator[str], vocab_size: int, pattern: str) -> str:
    """Return the tokenizer.json of a byte-pair encoding, by package `tokenizers`."""
    from tokenizers import AddedToken, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as HFTokenizer

    split = split_by(ENCODINGS[pattern][0])
    tree = json.loads(HFTokenizer(models.BPE()).to_str())
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}
    tokenizer = HFTokenizer.from_str(json.dumps(tree))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        # Every byte gets an id, so that text unlike this one has no unknown token.
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
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size={vocab_size}: expected {MIN_VOCAB_SIZE} (every byte, and"
            f" {END}) or more"
        )
    for name in (TOKENIZER_JSON, SETTINGS):
        # A run may use it; its data would be prepared anew, or be refused.
        if (out / name).exists():
            raise UserError(f"{out / name} exists; choose another out=, or remove it")
    # Read back as `data.tokenizer` reads it, before anything is written to `out`.
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / TOKENIZER_JSON
        file.write_text(train_bpe(texts, vocab_size, pattern), encoding="utf-8")
        tokenizer = get_tokenizer(str(file))
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_hf(out, tokenizer, None)
    except OSError as error:
        raise UserError(
            f"out={out}: {error.strerror}; choose another directory"
        ) from error
    return tokenizer


def main(args: Arguments, overrides: Sequence[str]) -> None:
    """Train, write, and show how the tokenizer is used."""
    check_at_least(args, max_chars=1)
    from trainer.assembly.data import build_source

    data_config = text_settings(overrides)
    # `text_settings` refuses the sources for which these are null.
    assert data_config.cache_dir is not None
    assert data_config.val_fraction is not None
    if data_config.max_tokens is not None:
        raise UserError(
            "data.max_tokens: there are no tokens yet; bound the text by"
            " data.max_documents or max_chars"
        )
    texts = ByteCounter(
        texts_of(
            build_source(data_config),
            Path(data_config.cache_dir),
            args.max_chars,
            0 if args.all_text else data_config.val_fraction,
        )
    )
    tokenizer = train(iter(texts), args.vocab_size, args.pattern, Path(args.out))
    fewer = ""
    if tokenizer.vocab_size < args.vocab_size:
        fewer = ": the text has no more pairs"
    show(f"{tokenizer.vocab_size:,} tokens from {texts.bytes:,} bytes of text{fewer}")
    show(f"wrote {args.out}; train with it: {override('data.tokenizer', args.out)}")
