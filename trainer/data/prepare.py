"""From a source to a prepared directory: in parallel, interruptible at any moment, cached by content.

The text is cut into chunks of about `shard_bytes`. Each chunk gives one shard per split, written under its final name
only when complete, then a line of `journal.jsonl` with what was counted and the position in the source. A process that
was killed leaves at most one chunk undone; the next one takes the last line and goes on from there. Where chunks end
depends on the content alone, so the result is the same to the byte as without interruption.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.corpus import Corpus, Position, Source, open_corpus
from trainer.data.shards import FORMAT, JOURNAL, MANIFEST, SPLITS, Manifest, Shard, Split, write_atomically
from trainer.data.tokenizer import Tokenizer, get_tokenizer
from trainer.errors import UserError

SHARD_BYTES = 64 << 20  # of text
UNIT_CHARS = 1 << 17  # what a thread encodes at a time
ROWS_AHEAD = 4  # batches of documents in memory

log = logging.getLogger("trainer")
Tokens = npt.NDArray[np.unsignedinteger]


class Progress(NamedTuple):
    """How far a preparation is; `fraction` is None where the size of the source is not known."""

    documents: int
    tokens: int
    bytes: int
    seconds: float
    resumed: bool
    fraction: float | None


@dataclass
class Counts:
    """What a split holds so far."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)


@dataclass
class Job:
    """One preparation: what it reads, where it writes, how far it is.

    Attributes:
      position: of the source, after the last chunk written.
      chars: of a single text, up to there.
      skipped: empty documents.
      chunks: written.
    """

    directory: Path
    fingerprint: str
    corpus: Corpus
    tokenizer: Tokenizer
    val_fraction: float
    position: Position = None
    chars: int = 0
    skipped: int = 0
    chunks: int = 0
    splits: dict[str, Counts] = field(default_factory=lambda: {split: Counts() for split in SPLITS})

    @property
    def dtype(self) -> np.dtype:
        """The narrowest that holds every id."""
        return np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4")


def prepare(
    source: Source,
    tokenizer_name: str,
    cache_dir: Path,
    *,
    val_fraction: float = 0.1,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Tokenise a source into `cache_dir`, or find it there.

    Args:
      source: what to read.
      tokenizer_name: see `get_tokenizer`.
      cache_dir: holds one directory per content, named by a hash of source, tokenizer and settings.
      val_fraction: share of the validation part: of the documents, chosen by a hash of their text (equal documents
        stay together, wherever they are); of a single text, its end.
      workers: threads that encode; None: all cores.
      shard_bytes: text per pair of shards, which is also the most that an interruption loses.
      progress: called after every batch of documents.

    Returns:
      the prepared directory.

    Raises:
      UserError: for whatever is wrong with source, tokenizer or disk.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction}: expected a number between 0 and 1, such as 0.01")
    cache_dir = Path(cache_dir)
    tokenizer = get_tokenizer(tokenizer_name)
    with disk_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        corpus = open_corpus(source)
        settings = [FORMAT, corpus.fingerprint, tokenizer.fingerprint, val_fraction, shard_bytes]
        fingerprint = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()
        directory = cache_dir / f"{slug(corpus.name)}-{slug(tokenizer.name)}-{fingerprint[:16]}"
        if not (directory / MANIFEST).is_file():
            with alone_in(directory):
                if not (directory / MANIFEST).is_file():  # another process may just have finished it
                    job = Job(directory, fingerprint, corpus, tokenizer, val_fraction)
                    run(job, workers or os.cpu_count() or 1, shard_bytes, progress or (lambda _: None))
    return directory


def run(job: Job, workers: int, shard_bytes: int, progress: Callable[[Progress], None]) -> None:
    """Do what is left of a job."""
    resume(job)
    resumed, started = job.chunks > 0, time.monotonic()
    chunk = Chunk()
    for batch in encoded(job, workers):
        chunk.add(batch)
        if chunk.bytes >= shard_bytes:
            commit(job, chunk)
            chunk = Chunk()
        counts = [*job.splits.values(), *chunk.splits.values()]
        chars = batch.chars
        progress(
            Progress(
                documents=sum(c.documents for c in counts),
                tokens=sum(c.tokens for c in counts),
                bytes=sum(c.bytes for c in counts),
                seconds=time.monotonic() - started,
                resumed=resumed,
                fraction=chars / job.corpus.length if job.corpus.length else None,
            )
        )
    if chunk.position is not None:
        commit(job, chunk)
    finish(job)


class Part(NamedTuple):
    """Text on its way to a split: whole documents, or a piece of a single text."""

    split: str
    documents: int
    bytes: int
    tokens: list["Future[Tokens]"]


class Batch(NamedTuple):
    """What became of one batch of rows."""

    parts: list[Part]
    skipped: int
    position: Position
    chars: int


class Chunk:
    """Batches that will be written together."""

    def __init__(self) -> None:
        self.arrays: dict[str, list[Tokens]] = {split: [] for split in SPLITS}
        self.splits = {split: Counts() for split in SPLITS}
        self.skipped = 0
        self.chars = 0
        self.position: Position = None

    @property
    def bytes(self) -> int:
        """Of text."""
        return sum(counts.bytes for counts in self.splits.values())

    def add(self, batch: Batch) -> None:
        """Wait for a batch's tokens and take them."""
        for part in batch.parts:
            arrays = [future.result() for future in part.tokens]
            self.arrays[part.split] += arrays
            counts = self.splits[part.split]
            counts.documents += part.documents
            counts.bytes += part.bytes
            counts.tokens += sum(len(array) for array in arrays)
        self.skipped += batch.skipped
        self.position, self.chars = batch.position, batch.chars


def encoded(job: Job, workers: int) -> Iterator[Batch]:
    """Batches in order, the next ones being read and encoded meanwhile."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    ahead: deque[Batch] = deque()
    try:
        chars = job.chars
        for rows in job.corpus.read(job.position):
            split_up = split_text if job.corpus.length else split_documents
            start, chars = chars, chars + sum(len(text) for text in rows.texts)
            parts = [submit(pool, job, *part) for part in split_up(job, rows.texts, start)]
            ahead.append(Batch(parts, sum(not text for text in rows.texts), rows.position, chars))
            if len(ahead) == ROWS_AHEAD:
                yield ahead.popleft()
        yield from ahead
    finally:
        pool.shutdown(cancel_futures=True)


def split_text(job: Job, texts: list[str], start: int) -> Iterator[tuple[str, list[str], bool]]:
    """Parts of a single text that goes on at character `start`: its last characters are for validation."""
    assert job.corpus.length is not None
    cut = int(job.corpus.length * (1 - job.val_fraction))
    for text in texts:
        at = min(max(cut - start, 0), len(text))
        yield "train", [text[:at]], False
        yield "val", [text[at:]], False
        start += len(text)


def split_documents(job: Job, texts: list[str], start: int) -> Iterator[tuple[str, list[str], bool]]:
    """Documents by split, in order; the hash of a document's text decides."""
    for_val = [below(text, job.val_fraction) for text in texts]
    for split in SPLITS:
        yield split, [text for text, val in zip(texts, for_val, strict=True) if text and val == (split == "val")], True


def below(text: str, fraction: float) -> bool:
    """Whether a uniform hash of the text, in [0, 1), is below `fraction`."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def submit(pool: ThreadPoolExecutor, job: Job, split: str, texts: list[str], documents: bool) -> Part:
    """Have texts encoded, each followed by end-of-text where they are documents."""
    tokenizer, dtype = job.tokenizer, job.dtype
    eot = np.array([tokenizer.eot], dtype)

    def encode(pieces: list[tuple[str, bool]]) -> Tokens:
        arrays: list[Tokens] = []
        for piece, last in pieces:
            arrays.append(tokenizer.encode_array(piece).astype(dtype))
            if last and documents:
                arrays.append(eot)
        return np.concatenate(arrays)

    futures: list[Future[Tokens]] = []
    unit: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        pieces = tokenizer.cut_up(text, UNIT_CHARS)
        for i, piece in enumerate(pieces):
            unit.append((piece, i == len(pieces) - 1))
            size += len(piece)
            if size >= UNIT_CHARS:
                futures.append(pool.submit(encode, unit))
                unit, size = [], 0
    if unit:
        futures.append(pool.submit(encode, unit))
    return Part(split, len(texts) if documents else 0, sum(len(text.encode()) for text in texts), futures)


def commit(job: Job, chunk: Chunk) -> None:
    """Write a chunk's shards, then the journal line that makes them count."""
    line: dict[str, Any] = {"position": chunk.position, "chars": chunk.chars, "skipped": chunk.skipped, "splits": {}}
    for split, counts in chunk.splits.items():
        entry: dict[str, Any] = {"documents": counts.documents, "tokens": counts.tokens, "bytes": counts.bytes}
        if counts.tokens:
            data = np.concatenate(chunk.arrays[split]).tobytes()
            name = f"{split}-{job.chunks:05d}.bin"
            write_atomically(job.directory / name, data)
            entry |= {"name": name, "crc32": zlib.crc32(data)}
        line["splits"][split] = entry
    with (job.directory / JOURNAL).open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    count(job, line)


def count(job: Job, line: dict[str, Any]) -> None:
    """Take a journal line into account."""
    job.position, job.chars = line["position"], line["chars"]
    job.skipped += line["skipped"]
    job.chunks += 1
    for split, entry in line["splits"].items():
        counts = job.splits[split]
        counts.documents += entry["documents"]
        counts.tokens += entry["tokens"]
        counts.bytes += entry["bytes"]
        if entry["tokens"]:
            counts.shards.append(Shard(entry["name"], entry["tokens"], entry["crc32"]))


def resume(job: Job) -> None:
    """Take up what an interrupted preparation left; a line that was not written to its end is dropped."""
    for partial in job.directory.glob("*.partial"):
        partial.unlink()
    path = job.directory / JOURNAL
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]
    for line in lines:
        count(job, json.loads(line))
    with path.open("r+b") as file:
        file.truncate(sum(len(line) + 1 for line in lines))


def finish(job: Job) -> None:
    """Write the manifest, which makes the directory complete."""
    total = sum(counts.tokens for counts in job.splits.values())
    if not total:
        raise UserError(f"the corpus is empty: {job.corpus.name} holds no text ({job.skipped} empty documents)")
    for split, counts in job.splits.items():
        if not counts.tokens:
            raise UserError(
                f"the {split} part of {job.corpus.name} is empty: {sum(c.documents for c in job.splits.values())} "
                f"documents and val_fraction={job.val_fraction}; use another data.val_fraction or more documents"
            )
    if job.corpus.length:
        for counts in job.splits.values():
            counts.documents = 1
    tokenizer = job.tokenizer
    tokenizer.save(job.directory)
    Manifest(
        directory=job.directory,
        fingerprint=job.fingerprint,
        source=job.corpus.description,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        dtype=job.dtype.name,
        val_fraction=job.val_fraction,
        skipped=job.skipped,
        splits={
            split: Split(counts.documents, counts.tokens, counts.bytes, tuple(counts.shards))
            for split, counts in job.splits.items()
        },
    ).save()
    (job.directory / JOURNAL).unlink()


def slug(name: str) -> str:
    """The end of a name as part of a directory name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[-40:]


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Wait until no other process prepares `directory`; the lock goes when the process does, however it ends."""
    directory.mkdir(exist_ok=True)
    with (directory / ".lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process prepares %s; waiting for it", directory)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Say where it was when the disk is full or may not be written to; what is done stays, and is continued."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise UserError(
            f"cannot write prepared data to {directory}: {error.strerror}; make room or choose another data.cache_dir, "
            "then run again to continue"
        ) from error
