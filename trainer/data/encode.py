"""Encode batches of texts into tokens of each split, in order, on several threads."""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.corpus import Position, TextBatch
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError

UNIT_CHARS = 1 << 17  # characters that a thread encodes at a time
BATCHES_AHEAD = 4  # bounds the texts in memory where reading is faster than encoding

Tokens = npt.NDArray[np.unsignedinteger]


class Piece(NamedTuple):
    """A text, or a cut of it, that is encoded in one call, and the text around it.

    `is_last` tells whether the text ends with the piece.
    """

    text: str
    preceding: str = ""
    following: str = ""
    is_last: bool = False


class EncodedSplit(NamedTuple):
    """The texts of a batch that go into one split.

    Attributes:
      split: "train" or "val".
      documents: number of documents that start in this split.
      bytes: size of the text as UTF-8.
      tokens: ids of the text, in order.
    """

    split: str
    documents: int
    bytes: int
    tokens: list[Future[Tokens]]

    def arrays(self) -> list[Tokens]:
        """Wait for the tokens, and return them."""
        return [future.result() for future in self.tokens]


class EncodedTexts(NamedTuple):
    """The encoded texts of a batch.

    Attributes:
      splits: one for each split.
      skipped: number of empty documents.
      position: where reading of the source continues after the batch.
      chars: characters of the source up to there.
    """

    splits: list[EncodedSplit]
    skipped: int
    position: Position
    chars: int

    def token_count(self) -> int:
        """Wait for the tokens, and return their number."""
        return sum(len(array) for split in self.splits for array in split.arrays())


@dataclass(frozen=True)
class Encoder:
    """An encoder of batches of texts.

    Attributes:
      tokenizer: the tokenizer.
      val_fraction: share of the validation part.
      cut: the character of the source where the validation part starts; None: the hash
          of a document decides.
      texts_are_documents: whether end-of-text follows each text; else the texts are
          pieces of a single one.
      workers: number of threads.
    """

    tokenizer: Tokenizer
    val_fraction: float
    cut: int | None
    texts_are_documents: bool
    workers: int

    @property
    def dtype(self) -> np.dtype:
        """The narrowest dtype that holds every id."""
        # Little-endian on every machine, since prepared data may be moved to another.
        return np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4")

    def encode(
        self, source: Iterator[TextBatch], chars: int, budget: int | None
    ) -> Iterator[EncodedTexts]:
        """Yield the encoded batches in their order, and read and encode ahead.

        Args:
          source: batches of texts.
          chars: characters of the source before the first of these batches.
          budget: stop after the document that reaches this many tokens.
        """
        # A preparation that was interrupted behind its last document has nothing to
        # read.
        if budget is not None and budget <= 0:
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="encode")
        try:
            for batch, encoded in self._encode_ahead(pool, source, chars):
                if budget is not None:
                    # It waits for this batch alone: the pool goes on with the batches
                    # behind it.
                    tokens = encoded.token_count()
                    if tokens >= budget:
                        start = encoded.chars - sum(map(len, batch.texts))
                        first_documents = self._until_budget(batch, budget)
                        yield self._submit(pool, first_documents, start)
                        return
                    budget -= tokens
                yield encoded
        finally:
            # A reader that stops early leaves units that nobody waits for.
            pool.shutdown(cancel_futures=True)

    def _encode_ahead(
        self, pool: ThreadPoolExecutor, source: Iterator[TextBatch], chars: int
    ) -> Iterator[tuple[TextBatch, EncodedTexts]]:
        """Yield each batch and its tokens, while the pool encodes the next batches."""
        ahead: deque[tuple[TextBatch, EncodedTexts]] = deque()
        for batch in source:
            encoded = self._submit(pool, batch, chars)
            chars = encoded.chars
            ahead.append((batch, encoded))
            if len(ahead) == BATCHES_AHEAD:
                yield ahead.popleft()
        yield from ahead

    def _submit(
        self, pool: ThreadPoolExecutor, batch: TextBatch, start: int
    ) -> EncodedTexts:
        """Encode a batch, from character `start` of the source on, in the pool."""
        # An empty document would be an end-of-text alone.
        texts = [text for text in batch.texts if text]
        if not self.texts_are_documents:
            texts = ["".join(batch.texts)]
        cut = None if self.cut is None else self.cut - start
        train_texts, val_texts = split_texts(texts, cut, self.val_fraction)
        # A piece sees only text of its own split. Documents have no text around them.
        train_preceding = val_preceding = train_following = val_following = ""
        if cut is not None:
            train_preceding, val_preceding = cut_text(
                batch.preceding, cut + len(batch.preceding)
            )
            train_following, val_following = cut_text(
                batch.following, cut - sum(map(len, texts))
            )
        train = self._encode_split(
            pool, "train", train_texts, train_preceding, train_following
        )
        val = self._encode_split(pool, "val", val_texts, val_preceding, val_following)
        # 1 if a text was cut in two: it counts as one document.
        cut_texts = len(train_texts) + len(val_texts) - len(texts)
        splits = [train, val._replace(documents=val.documents - cut_texts)]
        skipped = sum(not text for text in batch.texts)
        end = start + sum(map(len, batch.texts))
        return EncodedTexts(splits, skipped, batch.position, end)

    def _encode_split(
        self,
        pool: ThreadPoolExecutor,
        split: str,
        texts: list[str],
        preceding: str,
        following: str,
    ) -> EncodedSplit:
        """Encode the texts of a split.

        `preceding` and `following` are the text around a piece of a single text;
        `texts` then holds that piece alone.
        """
        futures: list[Future[Tokens]] = []
        unit: list[Piece] = []
        size = 0
        for text in texts:
            first_text, *other_texts = self.tokenizer.cut_up(text, UNIT_CHARS)
            # `cut_up` cuts where no text around a piece changes its ids, so only the
            # ends of the whole text need any.
            pieces = [Piece(first_text, preceding), *map(Piece, other_texts)]
            pieces[-1] = pieces[-1]._replace(following=following, is_last=True)
            for piece in pieces:
                unit.append(piece)
                size += len(piece.text)
                if size >= UNIT_CHARS:
                    futures.append(pool.submit(self._encode, unit))
                    unit, size = [], 0
        if unit:
            futures.append(pool.submit(self._encode, unit))
        return EncodedSplit(
            split, len(texts), sum(len(text.encode()) for text in texts), futures
        )

    def _encode(self, pieces: list[Piece]) -> Tokens:
        """Return the ids of pieces, with end-of-text at the end of each document."""
        eot = np.full(1, self.tokenizer.eot, self.dtype)
        arrays: list[Tokens] = []
        for piece in pieces:
            ids = self.tokenizer.encode_array(
                piece.text, piece.preceding, piece.following
            )
            # `astype` below would turn such an id into another one: 65,536 into 0.
            if ids.size and ids.max() >= self.tokenizer.vocab_size:
                raise UserError(
                    f"tokenizer {self.tokenizer.name} makes the id {ids.max()} of a"
                    f" text, but its ids are below {self.tokenizer.vocab_size};"
                    " download or copy it again"
                )
            arrays.append(ids.astype(self.dtype))
            if piece.is_last and self.texts_are_documents:
                arrays.append(eot)
        return np.concatenate(arrays)

    def _until_budget(self, batch: TextBatch, budget: int) -> TextBatch:
        """Return the first documents, up to the one that reaches `budget` tokens."""
        count = 0
        for text in batch.texts:
            if budget <= 0:
                break
            count += 1
            if text:
                # The units of a batch join documents, so that their tokens are counted
                # anew here, each with its end-of-text.
                budget -= len(self.tokenizer.encode_array(text)) + 1
        return TextBatch(batch.texts[:count], batch.position)


def split_texts(
    texts: list[str], cut: int | None, val_fraction: float
) -> tuple[list[str], list[str]]:
    """Split nonempty texts into those for training and those for validation, in order.

    Args:
      texts: nonempty texts.
      cut: the character of `texts`, joined, where the validation part starts; below 0
          if it starts before them. None: the hash of a text decides.
      val_fraction: share of the hashes that are for validation.
    """
    if cut is not None:
        return cut_at(texts, cut)
    train: list[str] = []
    val: list[str] = []
    for text in texts:
        split = val if uniform(text) < val_fraction else train
        split.append(text)
    return train, val


def cut_at(texts: list[str], cut: int) -> tuple[list[str], list[str]]:
    """Split texts at character `cut` of the joined texts; it may cut a text in two."""
    heads, tails = [], []
    for text in texts:
        head, tail = cut_text(text, cut)
        heads.append(head)
        tails.append(tail)
        cut -= len(text)
    return list(filter(None, heads)), list(filter(None, tails))


def cut_text(text: str, cut: int) -> tuple[str, str]:
    """Cut a text at character `cut`, which may lie before or after the text."""
    # A negative index would count from the end of the text.
    cut = max(cut, 0)
    return text[:cut], text[cut:]


def uniform(text: str) -> float:
    """Return a hash of a text, uniform in [0, 1): the same on all machines."""
    # Another hash would move documents between training and validation in all data that
    # is prepared again, and Python's own differs between processes.
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64
