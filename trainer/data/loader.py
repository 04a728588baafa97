"""Batches as a pure function of (seed, step).

No state is saved: a resumed run computes its next batch without reading the earlier
ones. Any number of processes reads the same batches.

A window is T+1 consecutive tokens, inputs and targets. Windows start every T tokens;
tokens after the last full window are not read. Sample g of a run, g = step * B + row,
is window `permute(seed, g // N, g % N, N)`. Each epoch has each window exactly once. A
batch may hold the end of one epoch and the start of the next.

Legend: B sequences of the global batch, b those of this process, T context, N windows.
"""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.permutation import permute
from trainer.data.shards import Manifest, stamp_of
from trainer.errors import UserError


class Batch(NamedTuple):
    """The tokens of a batch, or of some of its samples.

    Attributes:
      tokens: int32 [b, T+1]; inputs are [:, :-1], targets [:, 1:].
      segments: int32 [b, T+1] or None; the number of each token's document, counted
        from 0 in each row. An end-of-text token belongs to the document that it ends.
    """

    tokens: npt.NDArray[np.int32]
    segments: npt.NDArray[np.int32] | None


class Loader(Protocol):
    """Batches of one split.

    Attributes:
      manifest: the manifest of the data.
      context: T, in tokens.
      batch_size: B, sequences of the global batch over all processes.
      tokens: tokens of the split.
      document_mask: whether batches have segments.
    """

    manifest: Manifest
    context: int
    batch_size: int
    tokens: int
    document_mask: bool

    # Validations cache the bytes per token of each loader.
    def __hash__(self) -> int:
        """Return the hash of the object."""

    @property
    def steps_per_epoch(self) -> int:
        """Full batches of distinct windows; at least 1."""

    def batch(self, step: int) -> Batch:
        """Return batch `step`, counted from 0."""

    def documents(self, tokens: int) -> list[npt.NDArray[np.int64]]:
        """Return the first `tokens` tokens of the split, a list of documents.

        Each document ends with end-of-text; the last one is cut.
        """

    def validation_bytes_per_token(self, steps: int) -> float:
        """Return the mean bytes of source text per token of the validation part.

        `steps` is the number of batches that are read of a mixture.
        """


class ShardLoader:
    """A `Loader` of one split of a prepared directory.

    Args:
      directory: a prepared directory.
      split: "train" or "val".
      context: T, in tokens.
      batch_size: B, sequences of the global batch over all processes.
      seed: the seed of the shuffle, at least 0.
      document_mask: whether batches have segments.
      shuffle: whether windows are shuffled in each epoch; else they come in the order
        of the text.

    Attributes:
      windows: N.

    Raises:
      UserError: the directory is damaged, or the split is shorter than one window.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        *,
        context: int,
        batch_size: int,
        seed: int = 0,
        document_mask: bool = False,
        shuffle: bool = True,
    ) -> None:
        # Before the shards are verified: what changes meanwhile is verified again.
        stamps = {path.name: stamp_of(path) for path in Path(directory).glob("*.bin")}
        self.manifest = Manifest.load(directory)
        self.context = context
        self.batch_size = batch_size
        self._seed = seed
        self.document_mask = document_mask
        self._shuffle = shuffle
        self.tokens = self.manifest.token_count(split)
        # The last input of a window needs a target after it.
        self.windows = (self.tokens - 1) // context
        if self.windows < 1:
            raise UserError(
                f"the {split} part of {directory} has {self.tokens} tokens, one window"
                f" needs {context + 1} (model.context + 1); use more text, a smaller"
                " context, or another data.val_fraction"
            )
        self._shards = self.manifest.open(split)
        self._files = self.manifest.splits[split].shards
        self._stamps = [stamps.get(shard.name) for shard in self._files]
        self._starts = np.cumsum([0] + [len(shard) for shard in self._shards])

    def documents(self, tokens: int) -> list[npt.NDArray[np.int64]]:
        """See `Loader`."""
        heads, remaining = [], tokens
        for shard in self._shards:
            heads.append(np.asarray(shard[:remaining], np.int64))
            remaining -= len(heads[-1])
        ids = np.concatenate(heads)
        ends = np.flatnonzero(ids == self.manifest.eot) + 1
        # Behind an end-of-text at the very end, np.split returns an empty rest.
        return [document for document in np.split(ids, ends) if len(document)]

    @property
    def steps_per_epoch(self) -> int:
        """See `Loader`. A split of fewer than B windows repeats them in a batch."""
        return max(1, self.windows // self.batch_size)

    def validation_bytes_per_token(self, steps: int) -> float:
        """See `Loader`."""
        del steps
        return self.manifest.validation_bytes_per_token

    def batch(self, step: int) -> Batch:
        """See `Loader`."""
        return self.samples(step * self.batch_size + np.arange(self.batch_size))

    def samples(self, sample: npt.NDArray[np.int64]) -> Batch:
        """Return the samples with the numbers `sample` [b], counted over all epochs."""
        epoch, window = np.divmod(sample, self.windows)
        if self._shuffle:
            window = permute(self._seed, epoch, window, self.windows)
        tokens = np.empty((len(sample), self.context + 1), np.int32)
        for row, start in zip(tokens, window * self.context, strict=True):
            self._read(int(start), row)
        return Batch(
            tokens, segments(tokens, self.manifest.eot) if self.document_mask else None
        )

    def _read(self, start: int, out: npt.NDArray[np.int32]) -> None:
        """Fill `out` with consecutive tokens, which may lie in several shards."""
        # "right": a window that begins where a shard does is in that shard.
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            file = self._files[shard]
            if (stamp := self.manifest.stamp(file)) != self._stamps[shard]:
                # Reading a memory map of a truncated file would end the process with
                # SIGBUS. A file that was replaced needs another map.
                self.manifest.verify_shard(file)
                self._shards[shard] = self.manifest.open_shard(file)
                self._stamps[shard] = stamp
            offset = start + filled - int(self._starts[shard])
            tokens = self._shards[shard][offset : offset + len(out) - filled]
            out[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            shard += 1


def segments(tokens: npt.NDArray[np.int32], eot: int) -> npt.NDArray[np.int32]:
    """Return the number of end-of-text tokens before each position of a row, int32."""
    ends = (tokens == eot).astype(np.int32)
    # An end-of-text token belongs to the document that it ends, not to the next.
    return np.cumsum(ends, axis=-1, dtype=np.int32) - ends


def validation_rows(windows: int, batch_size: int, row_multiple: int, name: str) -> int:
    """Return the number of rows of a validation batch, in which no window is repeated.

    Args:
      windows: number of validation windows.
      batch_size: rows of a training batch, a multiple of `row_multiple`.
      row_multiple: micro-batches times devices, over which rows are split.
      name: names the text in the message.

    Raises:
      UserError: there are fewer windows than parts.
    """
    # Micro-batches and devices take equal numbers of rows.
    rows = min(batch_size, windows // row_multiple * row_multiple)
    if not rows:
        raise UserError(
            f"{name} has {windows} windows of model.context + 1 tokens, fewer than the"
            f" {row_multiple} parts of a batch (train.grad_accum_steps x devices); use"
            " more text, or a larger data.val_fraction"
        )
    return rows


def prefetch(
    loader: Loader, start: int, stop: int, depth: int = 2
) -> Iterator[tuple[int, Batch]]:
    """Yield (step, batch) for steps start..stop-1, up to `depth` batches ahead.

    A background thread reads the batches. An error in it is raised here, at its step.
    The thread ends when the iterator is exhausted, closed or garbage-collected.
    """
    ready: queue.Queue[tuple[int, Batch] | BaseException] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: tuple[int, Batch] | BaseException) -> None:
        while not closed.is_set():
            try:
                # The consumer may stop reading while the queue is full.
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for step in range(start, stop):
                if closed.is_set():
                    return
                put((step, loader.batch(step)))
        except BaseException as error:  # raised in the consumer's thread
            put(error)

    # A daemon: a process that ends without closing the iterator waits for no batch.
    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        for _ in range(start, stop):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        # No thread reads the shards of a loader whose iterator is closed.
        thread.join()
