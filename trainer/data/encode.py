"""Rows of text to the tokens of each split: on several threads, in order."""

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.corpus import Position, Rows
from trainer.data.tokenizer import Tokenizer

UNIT_CHARS = 1 << 17  # what a thread encodes at a time
ROWS_AHEAD = 4  # batches of rows in memory

Tokens = npt.NDArray[np.unsignedinteger]


class Part(NamedTuple):
    """What of some rows goes into one split; a document that is cut in two is counted
    where it begins.
    """

    split: str
    documents: int
    bytes: int
    tokens: list[Future[Tokens]]

    def arrays(self) -> list[Tokens]:
        """The tokens, waited for."""
        return [future.result() for future in self.tokens]


class EncodedTexts(NamedTuple):
    """The encoded texts of some rows of the source.

    Attributes:
      skipped: empty documents.
      position: of the source, after them.
      chars: of the whole text, up to there.
    """

    parts: list[Part]
    skipped: int
    position: Position
    chars: int


@dataclass(frozen=True)
class Encoder:
    """How rows become tokens.

    Attributes:
      val_fraction: share of the validation part.
      cut: the character of the whole text at which the validation part starts; None:
          hashes of documents decide.
      documents: whether rows are documents, which end-of-text follows; else they are
          pieces of a single text.
      workers: threads.
    """

    tokenizer: Tokenizer
    val_fraction: float
    cut: int | None
    documents: bool
    workers: int

    @property
    def dtype(self) -> np.dtype:
        """The narrowest that holds every id."""
        return np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4")

    def encode(
        self, source: Iterator[Rows], chars: int, budget: int | None
    ) -> Iterator[EncodedTexts]:
        """Batches in the order of the rows; the next rows are read and encoded
        meanwhile.

        Args:
          chars: of the text, before the first of these rows.
          budget: stop after the document that reaches so many tokens.
        """
        if budget is not None and budget <= 0:
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="encode")
        ahead: deque[tuple[Rows, EncodedTexts]] = deque()
        try:
            for rows in itertools.chain(source, [None] * ROWS_AHEAD):
                if rows is not None:
                    batch = self._submit(pool, rows, chars)
                    chars = batch.chars
                    ahead.append((rows, batch))
                if ahead and (rows is None or len(ahead) == ROWS_AHEAD):
                    first, batch = ahead.popleft()
                    if budget is not None:
                        size = sum(
                            len(array)
                            for part in batch.parts
                            for array in part.arrays()
                        )
                        if size >= budget:
                            start = batch.chars - sum(map(len, first.texts))
                            yield self._submit(pool, self._within(first, budget), start)
                            return
                        budget -= size
                    yield batch
        finally:
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, rows: Rows, start: int) -> EncodedTexts:
        """Have rows encoded that begin at character `start`."""
        texts = (
            [text for text in rows.texts if text]
            if self.documents
            else ["".join(rows.texts)]
        )
        before, after = divided(
            texts, None if self.cut is None else self.cut - start, self.val_fraction
        )
        train, val = self._part(pool, "train", before), self._part(pool, "val", after)
        twice = len(before) + len(after) - len(texts)  # 1 where a text was cut in two
        parts = [train, val._replace(documents=val.documents - twice)]
        skipped = sum(not text for text in rows.texts)
        return EncodedTexts(
            parts, skipped, rows.position, start + sum(map(len, rows.texts))
        )

    def _part(self, pool: ThreadPoolExecutor, split: str, texts: list[str]) -> Part:
        futures: list[Future[Tokens]] = []
        unit: list[tuple[str, bool]] = []
        size = 0
        for text in texts:
            pieces = self.tokenizer.cut_up(text, UNIT_CHARS)
            for i, piece in enumerate(pieces):
                unit.append((piece, i == len(pieces) - 1))
                size += len(piece)
                if size >= UNIT_CHARS:
                    futures.append(pool.submit(self._encode, unit))
                    unit, size = [], 0
        if unit:
            futures.append(pool.submit(self._encode, unit))
        return Part(
            split, len(texts), sum(len(text.encode()) for text in texts), futures
        )

    def _encode(self, pieces: list[tuple[str, bool]]) -> Tokens:
        """Ids of pieces, end-of-text after those that end a document (a single text has
        no end to mark).
        """
        eot = np.full(1, self.tokenizer.eot, self.dtype)
        arrays: list[Tokens] = []
        for piece, last in pieces:
            arrays.append(self.tokenizer.encode_array(piece).astype(self.dtype))
            if last and self.documents:
                arrays.append(eot)
        return np.concatenate(arrays)

    def _within(self, rows: Rows, budget: int) -> Rows:
        """The first documents, up to the one that reaches `budget` tokens."""
        count = 0
        for text in rows.texts:
            if budget <= 0:
                break
            count += 1
            budget -= len(self.tokenizer.encode_array(text)) + 1 if text else 0
        return Rows(rows.texts[:count], rows.position)


def divided(
    texts: list[str], cut: int | None, val_fraction: float
) -> tuple[list[str], list[str]]:
    """Texts that are not empty, as those of the training and of the validation part, in
    order.

    Args:
      cut: the character of these texts at which the validation part starts; None: the
          hash of a text decides.
      val_fraction: share of the hashes that are for validation.
    """
    if cut is not None:
        return cut_at(texts, cut)
    chosen = [uniform(text) < val_fraction for text in texts]
    return [t for t, val in zip(texts, chosen, strict=True) if not val], list(
        itertools.compress(texts, chosen)
    )


def cut_at(texts: list[str], cut: int) -> tuple[list[str], list[str]]:
    """The texts before and after character `cut` of them all; the one that it is in
    gives both a part.
    """
    before, after = [], []
    for text in texts:
        at = min(max(cut, 0), len(text))
        before.append(text[:at])
        after.append(text[at:])
        cut -= len(text)
    return [text for text in before if text], [text for text in after if text]


def uniform(text: str) -> float:
    """A hash of a text, uniform in [0, 1): the same everywhere and for ever."""
    return (
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        / 2.0**64
    )
