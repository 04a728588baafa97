"""Measure the data path: tokenization against tiktoken's own, and the loader.

`prepare` (read, tokenize, hash, write shards) and tiktoken's `encode_ordinary_batch`
are interleaved, with equally many threads, on the same text: several copies of the
embedded corpus, cut into documents.
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.arguments import argument, run_script
from trainer.data import Loader, TextSource, get_tokenizer, prepare
from trainer.data.corpus import open_embedded
from trainer.data.tokenizer import BPETokenizer
from trainer.errors import UserError

DOCUMENT_CHARS = 4000


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    tokenizer: str = argument(
        "gpt2, any tiktoken name, or a vocab.bpe or .tiktoken file", "gpt2"
    )
    copies: int = argument("times the embedded corpus (4.1 MB) is read", 8)
    threads: int = argument("of both", 2)
    rounds: int = argument("turns of each", 5)
    context: int = argument("tokens per sequence, of the loader", 1024)
    batch: int = argument("sequences per batch, of the loader", 8)


def documents(copies: int) -> list[str]:
    """Return the embedded corpus, cut into documents.

    Each copy starts with its number, so that no two documents are equal.
    """
    [corpus] = next(iter(open_embedded().read(None))).texts
    starts = range(0, len(corpus), DOCUMENT_CHARS)
    cut = [corpus[i : i + DOCUMENT_CHARS] for i in starts]
    return [f"{copy} {text}" for copy in range(copies) for text in cut]


def main(args: Arguments) -> None:
    """Measure and print."""
    texts = documents(args.copies)
    tokenizer = get_tokenizer(args.tokenizer)
    if not isinstance(tokenizer, BPETokenizer):
        raise UserError(
            f"tokenizer={args.tokenizer} is not tiktoken's; give gpt2, cl100k_base or a"
            " vocab.bpe file"
        )
    encoding = tokenizer.encoding
    ratios, seconds = [], []
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "documents.jsonl")
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for i in range(args.rounds + 1):  # the first imports and warms up
            start = time.perf_counter()
            count = sum(
                map(
                    len, encoding.encode_ordinary_batch(texts, num_threads=args.threads)
                )
            )
            middle = time.perf_counter()
            cache = Path(scratch, str(i))
            directory = prepare(
                TextSource((str(source),), "jsonl"),
                args.tokenizer,
                cache,
                workers=args.threads,
            )
            seconds.append(time.perf_counter() - middle)
            ratios.append((middle - start) / seconds[-1])
        ratios, seconds = ratios[1:], seconds[1:]
        print(f"prepare   {count / statistics.median(seconds):12,.0f} tokens/s")
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(
            f"prepare / tiktoken {statistics.median(ratios):.2f} ({spread}),"
            f" {args.threads} threads"
        )

        loader = Loader(directory, "train", context=args.context, batch_size=args.batch)
        start = time.perf_counter()
        batches = 200
        for step in range(batches):
            loader.batch(step)
        print(
            f"loader    {1e3 * (time.perf_counter() - start) / batches:.3f} ms a batch"
            f" of {args.batch} x {args.context}"
        )


if __name__ == "__main__":
    raise SystemExit(run_script(Arguments, "bench.data", __doc__ or "", main))
