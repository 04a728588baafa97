"""Preparation of a source: parallel, interruptible at any moment, cached by content.

The text is cut into chunks of about `shard_bytes`. Each chunk gives one shard per
split, written under its final name only when complete. Then a line of `journal.jsonl`
records counts and the position in the source. A killed process loses at most one chunk;
the next process continues after the last line. The ends of chunks depend on the content
alone, so an interruption does not change a byte of the result.
"""

import fcntl
import itertools
import json
import logging
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.data.corpus import (
    Corpus,
    Position,
    PreparedSource,
    Source,
    TextBatch,
    open_corpus,
)
from trainer.data.encode import EncodedTexts, Encoder, Tokens, split_texts
from trainer.data.shards import (
    JOURNAL,
    MANIFEST,
    SHARD_VERSION,
    SPLITS,
    Manifest,
    Shard,
    Split,
    digest,
    digest_of_bytes,
    read_json_or_empty,
    repair,
)
from trainer.data.tokenizer import (
    TRIED,
    Tokenizer,
    changed_characters,
    get_tokenizer,
)
from trainer.errors import UserError
from trainer.files import (
    LOG_BYTES,
    no_follow,
    own_copy,
    parse_json,
    read_file,
    remove_partial,
    well_formed,
    write_atomically,
)
from trainer.text import note, plural

# Bytes of text. A process that is killed loses about as much: a shard ends behind a
# batch.
SHARD_BYTES = 64 << 20
# Expected number of validation documents. With fewer the hash may choose none: of 5
# expected it does so for 0.7% of texts (e^-5).
MIN_EXPECTED_VAL = 5
MAX_COUNTED = 1000  # Read no more documents than this to count them.
COMMON_END = "<|endoftext|>"  # separates documents in many files
# To look for 50,000 names of a tokenizer took minutes for each megabyte.
SEARCHED = 1 << 16  # characters that are searched for special tokens

log = logging.getLogger("trainer")


class Progress(NamedTuple):
    """The progress of a preparation.

    Attributes:
      documents: documents of both splits, including those before an interruption.
      tokens: their tokens.
      bytes: the bytes of their text.
      new_tokens: tokens that this process made.
      seconds: seconds since this process started.
      fraction: fraction of the source; None if its size is unknown.
    """

    documents: int
    tokens: int
    bytes: int
    new_tokens: int
    seconds: float
    fraction: float | None


@dataclass
class Counts:
    """Counts of a split so far."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)


def new_counts() -> dict[str, Counts]:
    """Return zero counts for each split."""
    return {split: Counts() for split in SPLITS}


@dataclass
class Preparation:
    """The state of a preparation.

    Attributes:
      directory: the output.
      fingerprint: a digest of source, tokenizer and settings.
      corpus: the source.
      encoder: encodes its texts.
      position: where reading continues after the last written chunk.
      chars: characters of the source up to there.
      skipped: number of empty documents.
      chunks: number of written chunks.
      splits: counts by split.
    """

    directory: Path
    fingerprint: str
    corpus: Corpus
    encoder: Encoder
    position: Position = None
    chars: int = 0
    skipped: int = 0
    chunks: int = 0
    splits: dict[str, Counts] = field(default_factory=new_counts)

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return sum(counts.tokens for counts in self.splits.values())


def prepare(
    source: Source,
    tokenizer_name: str | None,
    cache_dir: Path,
    *,
    val_fraction: float = 0.1,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Tokenize a source into `cache_dir`, or find the result there.

    A hash of a document's text decides whether it is for validation, so equal documents
    stay together. If there is a single text, or so few documents that the hash might
    choose none, the validation part is the end of the text.

    Args:
      source: the text. A PreparedSource is checked and returned.
      tokenizer_name: see `get_tokenizer`. None, for a PreparedSource only: its own.
      cache_dir: has one directory per content, named by a hash of source, tokenizer
          and settings.
      val_fraction: share of the validation part.
      workers: number of encoding threads; None: one per core.
      shard_bytes: bytes of text of a chunk, which gives one shard per split; an
          interruption loses at most one chunk.
      progress: called after every batch of texts.

    Returns:
      the prepared directory.

    Raises:
      UserError: any problem with source, tokenizer or disk.
    """
    if isinstance(source, PreparedSource):
        return check_prepared(Path(source.directory), tokenizer_name)
    if tokenizer_name is None:
        raise UserError(
            "data.tokenizer is null; name one: byte, gpt2, cl100k_base, or a file"
        )
    if not 0 < val_fraction < 1:
        raise UserError(
            f"val_fraction={val_fraction}: expected a number between 0 and 1, such as"
            " 0.01"
        )
    cache_dir = Path(cache_dir)
    tokenizer = get_tokenizer(tokenizer_name)
    with disk_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        corpus = open_corpus(source, cache_dir)
        settings = [
            SHARD_VERSION,
            corpus.fingerprint,
            tokenizer.fingerprint,
            val_fraction,
            shard_bytes,
        ]
        fingerprint = digest(settings)
        directory = (
            cache_dir / f"{slug(corpus.name)}-{slug(tokenizer.name)}-{fingerprint[:16]}"
        )
        # Without the lock, whose file cannot be written on a disk that is read-only.
        if is_prepared(directory, fingerprint):
            return directory
        with exclusive_lock(directory):
            # Another process may just have finished it.
            if is_prepared(directory, fingerprint):
                return directory
            if changed := changed_characters(tokenizer):
                note(
                    f"data.tokenizer={tokenizer_name} changes or leaves out"
                    f" {len(changed)} of {len(TRIED)} characters of ASCII and other"
                    f" scripts in a text: {changed!r}"
                )
            encoder = Encoder(
                tokenizer,
                val_fraction,
                validation_start(corpus, val_fraction),
                texts_are_documents=corpus.length is None,
                workers=workers or os.cpu_count() or 1,
            )
            run(
                Preparation(directory, fingerprint, corpus, encoder),
                shard_bytes,
                progress or (lambda _: None),
            )
    return directory


def validation_start(corpus: Corpus, val_fraction: float) -> int | None:
    """Return the character where the validation part of a corpus starts.

    None: a hash of each document decides, because there are enough documents. The
    hash also decides if `max_tokens` bounds the corpus, because its length is then
    unknown.
    """
    if corpus.length is not None:
        return int(corpus.length * (1 - val_fraction))
    if corpus.max_tokens is not None:
        return None
    enough = min(math.ceil(MIN_EXPECTED_VAL / val_fraction), MAX_COUNTED)
    documents = chars = 0
    for batch in corpus.read(None):
        documents += sum(map(bool, batch.texts))
        chars += sum(map(len, batch.texts))
        if documents >= enough:
            return None
    return int(chars * (1 - val_fraction))


def training_part(corpus: Corpus, val_fraction: float) -> Iterator[str]:
    """Yield the texts of a corpus that `prepare` uses for training, in pieces."""
    cut = validation_start(corpus, val_fraction)
    for batch in corpus.read(None):
        train, _ = split_texts(list(filter(None, batch.texts)), cut, val_fraction)
        yield from train
        if cut is not None:
            cut -= sum(map(len, batch.texts))


def is_prepared(directory: Path, fingerprint: str) -> bool:
    """Return whether a directory of the cache holds the tokens of this fingerprint.

    Raises:
      UserError: it holds others.
    """
    if not (directory / MANIFEST).is_file():
        return False
    check_fingerprint(directory, read_json_or_empty(directory / MANIFEST), fingerprint)
    return True


def check_fingerprint(
    directory: Path, record: Mapping[str, Any], fingerprint: str
) -> None:
    """Raise UserError for a manifest, or a line of a journal, of other data.

    Lines of earlier versions have no fingerprint.
    """
    if record.get("fingerprint", fingerprint) != fingerprint:
        raise UserError(
            f"{directory} holds other data than its name says; give it its own name"
            " again, or remove it"
        )


def check_prepared(directory: Path, tokenizer_name: str | None) -> Path:
    """Return a prepared directory after checking it and its tokenizer.

    Raises:
      UserError: it is damaged, or was made with another tokenizer.
    """
    manifest = Manifest.load(directory)
    if tokenizer_name is not None:
        tokenizer = get_tokenizer(tokenizer_name)
        if tokenizer.fingerprint != manifest.tokenizer_fingerprint:
            raise UserError(
                f"{directory} was made with tokenizer {manifest.tokenizer!r} of"
                f" {manifest.vocab_size} ids, not with {tokenizer_name!r} of"
                f" {tokenizer.vocab_size}; set data.tokenizer=null to use its own"
            )
    return directory


def run(
    job: Preparation, shard_bytes: int, progress: Callable[[Progress], None]
) -> None:
    """Prepare the rest of the source."""
    resume(job)
    resumed_tokens, started = job.tokens, time.monotonic()
    budget = job.corpus.max_tokens
    if budget is not None:
        budget -= resumed_tokens
    chunk = Chunk()
    tokenizer = job.encoder.tokenizer
    batches = note_special_tokens(
        job.corpus.batches_for(tokenizer, job.position), tokenizer
    )
    for encoded in job.encoder.encode(batches, job.chars, budget):
        chunk.add(encoded)
        seconds = time.monotonic() - started
        progress(progress_of(job, chunk, resumed_tokens, seconds))
        # Counted from the last commit, where an interrupted preparation goes on: so its
        # chunks end behind the same batches.
        if chunk.bytes >= shard_bytes:
            commit(job, chunk)
            chunk = Chunk()
    # A last chunk may hold empty documents alone, which count as skipped.
    if chunk.position is not None:
        commit(job, chunk)
    finish(job)


def note_special_tokens(
    batches: Iterator[TextBatch], tokenizer: Tokenizer
) -> Iterator[TextBatch]:
    """Yield batches, and print which special tokens the start of the first one spells.

    Other trainers encode such text as special tokens, which end a document or a turn of
    a chat.
    """
    first_batch = next(batches, None)
    if first_batch is None:
        return
    # A tokenizer may have as many names as the text has words.
    starts = itertools.accumulate(map(len, first_batch.texts), initial=0)
    texts = [
        text[: max(0, SEARCHED - start)]
        for text, start in zip(first_batch.texts, starts, strict=False)
    ]
    # `byte` ends documents with NUL, and encodes a NUL in a text as U+FFFD.
    names = {*tokenizer.special_tokens, COMMON_END} - {"", "\0"}
    counts = {name: sum(text.count(name) for text in texts) for name in sorted(names)}
    listed = ", ".join(
        f"{name!r} ({count:,} times)" for name, count in counts.items() if count
    )
    if listed:
        note(
            f"the first {sum(map(len, texts)):,} characters contain {listed}, encoded"
            " as ordinary characters: text never becomes a special token; to separate"
            " documents, write each as a row of JSON lines"
        )
    yield first_batch
    yield from batches


class Chunk:
    """Batches that are written together."""

    def __init__(self) -> None:
        self.arrays: dict[str, list[Tokens]] = {split: [] for split in SPLITS}
        self.splits = new_counts()
        self.skipped = 0
        self.chars = 0
        self.position: Position = None

    @property
    def bytes(self) -> int:
        """Bytes of text."""
        return sum(counts.bytes for counts in self.splits.values())

    def add(self, batch: EncodedTexts) -> None:
        """Wait for a batch's tokens and append them."""
        for encoded in batch.splits:
            arrays = encoded.arrays()
            self.arrays[encoded.split] += arrays
            counts = self.splits[encoded.split]
            counts.documents += encoded.documents
            counts.bytes += encoded.bytes
            counts.tokens += sum(len(array) for array in arrays)
        self.skipped += batch.skipped
        self.position, self.chars = batch.position, batch.chars


def progress_of(
    job: Preparation, chunk: Chunk, resumed_tokens: int, seconds: float
) -> Progress:
    """Return the progress of written shards and `chunk`.

    `resumed_tokens` is the number of tokens before this process started.
    """
    counts = [*job.splits.values(), *chunk.splits.values()]
    tokens = sum(c.tokens for c in counts)
    if job.corpus.length is not None:
        fraction = chunk.chars / job.corpus.length
    elif job.corpus.max_tokens is not None:
        fraction = min(1.0, tokens / job.corpus.max_tokens)
    else:
        fraction = None
    documents, size = sum(c.documents for c in counts), sum(c.bytes for c in counts)
    new_tokens = tokens - resumed_tokens
    return Progress(documents, tokens, size, new_tokens, seconds, fraction)


def commit(job: Preparation, chunk: Chunk) -> None:
    """Write a chunk's shards, and then the journal line that records them.

    Raises:
      UserError: a file has changed, and the chunk may hold its new text under the
        fingerprint of the old one.
    """
    for text_file in job.corpus.files:
        text_file.check_unchanged()
    line: dict[str, Any] = {
        "fingerprint": job.fingerprint,
        "position": chunk.position,
        "chars": chunk.chars,
        "skipped": chunk.skipped,
        "splits": {},
    }
    for split, counts in chunk.splits.items():
        entry: dict[str, Any] = {
            "documents": counts.documents,
            "tokens": counts.tokens,
            "bytes": counts.bytes,
        }
        if counts.tokens:
            data = np.concatenate(chunk.arrays[split]).tobytes()
            name = shard_name(split, job.chunks)
            write_atomically(job.directory / name, data)
            entry |= {
                "name": name,
                "crc32": zlib.crc32(data),
                "digest": digest_of_bytes(data).hexdigest(),
            }
        line["splits"][split] = entry
    # After the shards are on disk: a line never names a file that a power failure may
    # take back. `own_copy`: a backup of hard links keeps its journal.
    with open(job.directory / JOURNAL, "ab", opener=own_copy) as file:
        with_digest = line | {"digest": digest(line)}
        file.write(json.dumps(with_digest).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    apply_line(job, line)


def shard_name(split: str, chunk: int) -> str:
    """Return the name of the shard of a chunk, counted from 0."""
    return f"{split}-{chunk:05d}.bin"


def apply_line(job: Preparation, line: dict[str, Any]) -> None:
    """Add the counts of a journal line to the preparation, and set its position.

    Raises ValueError if the line before it is missing, or the line is there twice.
    """
    job.position, job.chars = line["position"], line["chars"]
    job.skipped += line["skipped"]
    for split, entry in line["splits"].items():
        # Each line has its own digest, so only the names tell that one is missing.
        if entry["tokens"] and entry["name"] != shard_name(split, job.chunks):
            raise ValueError(
                f"line {job.chunks + 1} is that of {entry['name']}, out of order"
            )
        counts = job.splits[split]
        counts.documents += entry["documents"]
        counts.tokens += entry["tokens"]
        counts.bytes += entry["bytes"]
        if entry["tokens"]:
            # A journal of an earlier version has no digest of a shard.
            shard_digest = entry.get("digest", "")
            counts.shards.append(
                Shard(entry["name"], entry["tokens"], entry["crc32"], shard_digest)
            )
    job.chunks += 1


def resume(job: Preparation) -> None:
    """Restore an interrupted preparation from its journal; drop a torn last line."""
    remove_partial(job.directory)
    path = job.directory / JOURNAL
    if not path.exists():
        return
    # What follows the last line feed is a line that was not finished.
    lines = read_file(path, LOG_BYTES).split(b"\n")[:-1]
    with well_formed(path, repair(job.directory)):
        for line in lines:
            tree = parse_json(line)
            # A changed position would leave out text, or read it twice.
            if tree.pop("digest") != digest(tree):
                raise ValueError("a line was altered since it was written")
            check_fingerprint(job.directory, tree, job.fingerprint)
            apply_line(job, tree)
    with open(path, "r+b", opener=own_copy) as file:
        # The next line would be joined to the torn one.
        file.truncate(sum(len(line) + 1 for line in lines))
    if lines:
        log.info("continuing %s after %s tokens", job.directory, f"{job.tokens:,}")


def finish(job: Preparation) -> None:
    """Write the manifest, which makes the directory complete."""
    corpus, tokenizer = job.corpus, job.encoder.tokenizer
    if not job.tokens:
        raise UserError(
            f"the corpus is empty: {corpus.name} has no text, only {job.skipped} empty"
            " documents"
        )
    for split, counts in job.splits.items():
        if not counts.tokens:
            raise UserError(
                f"the {split} part of {corpus.name} is empty, with"
                f" {plural(sum(c.documents for c in job.splits.values()), 'document')}"
                f" and val_fraction={job.encoder.val_fraction}; use more documents or"
                " another data.val_fraction"
            )
    # Before the manifest, which says that the directory is complete.
    tokenizer.save(job.directory)
    Manifest(
        directory=job.directory,
        fingerprint=job.fingerprint,
        source=corpus.description,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        dtype=job.encoder.dtype.name,
        val_fraction=job.encoder.val_fraction,
        skipped=job.skipped,
        splits={
            # A split of a single text counts as one document.
            split: Split(
                1 if corpus.length else c.documents, c.tokens, c.bytes, tuple(c.shards)
            )
            for split, c in job.splits.items()
        },
    ).save()
    # After the manifest: a process that is killed in between leaves complete data.
    (job.directory / JOURNAL).unlink()


def slug(name: str) -> str:
    """Return the last 40 characters of a name, as a part of a directory name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[-40:]


@contextmanager
def exclusive_lock(directory: Path) -> Iterator[None]:
    """Wait until no other process prepares `directory`, and lock it.

    The lock ends with the process, however it ends.
    """
    directory.mkdir(exist_ok=True)
    # flock is bound to the open file, so the kernel unlocks it when a process is
    # killed.
    with open(directory / ".lock", "ab", opener=no_follow) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process prepares %s; waiting for it", directory)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the directory.

    Finished chunks stay, and the next `prepare` continues after them.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write prepared data to {directory}: {error.strerror or error};"
            " make room or choose another data.cache_dir, then run again to continue"
        ) from error
