"""Bytes of text that the targets of batches stand for, for bits per byte."""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from trainer.data.json_tokenizer import SPACE, JSONTokenizer, NoToken
from trainer.data.loader import Batch
from trainer.data.tokenizer import Tokenizer

# Characters that tokenizers change or leave out: cases, spaces around punctuation, line
# ends, accents in two spellings, Chinese, an emoji, a ligature.
SAMPLE_TEXT = (
    'F(x)=a-b/c, "it\'s" 12.5%:\n\n  Two\tcafe\N{COMBINING ACUTE ACCENT} café 日本 🙂'
    " \N{LATIN SMALL LIGATURE FI}"
)
# A normalizer may strip the ends of a text.
PADDED_SAMPLE_TEXT = f"\n {SAMPLE_TEXT} \n"


def bytes_per_target(
    batches: Iterable[Batch], tokenizer: Tokenizer, source_bytes_per_token: float
) -> float:
    """Return the mean bytes of text per target of these batches.

    Special tokens stand for no text. If the tokenizer lists no tokens
    (NumberTokenizer), each id counts as a byte. NaN if the targets have no text.

    Args:
      batches: the batches.
      tokenizer: the tokenizer of their ids.
      source_bytes_per_token: the mean of the source text, which is returned if the
        tokenizer changes a text.
    """
    spells_bytes = True
    if isinstance(tokenizer, JSONTokenizer):
        if not restores_text(tokenizer):
            return source_bytes_per_token
        spells_bytes = tokenizer.spells_bytes
    unknown_size = 0 if tokenizer.tokens else 1
    sizes = np.full(tokenizer.vocab_size, unknown_size)
    for token, i in tokenizer.tokens.items():
        sizes[i] = len(token)
    sizes[list(tokenizer.special_tokens.values())] = 0
    means = []
    for batch in batches:
        if not spells_bytes:
            # Tokens have marks, such as ## and </w>, that stand for no text.
            size = sum(decoded_bytes(row, tokenizer) for row in batch.tokens)
            means.append(size / batch.tokens[:, 1:].size)
        else:
            means.append(float(sizes[batch.tokens[:, 1:]].mean()))
    # Bits per byte divide by it: NaN is no figure, and 0 would be an error.
    return math.fsum(means) / len(means) or math.nan


def restores_text(tokenizer: JSONTokenizer) -> bool:
    """Return whether the ids of a text give the text.

    A decoder may put spaces between tokens, or a normalizer or pre-tokenizer may change
    the text before it is encoded. Tokens that are bytes are joined without the decoder.
    """
    texts = [SAMPLE_TEXT]
    if tokenizer.spells_bytes:
        texts.append(PADDED_SAMPLE_TEXT)
    bytes_of = {i: token for token, i in tokenizer.tokens.items()}
    for text in texts:
        try:
            ids = tokenizer.encode(text)
        except NoToken:
            return False
        if tokenizer.spells_bytes:
            restored = b"".join(bytes_of.get(i, b"") for i in ids)
        else:
            restored = tokenizer.decode(ids).encode()
        if restored != text.encode():
            return False
    return True


def decoded_bytes(row: npt.NDArray[np.int32], tokenizer: Tokenizer) -> int:
    """Return the bytes of text of `row[1:]`, decoded after `row[0]`."""

    def size(ids: npt.NDArray[np.int32]) -> int:
        special = list(tokenizer.special_tokens.values())
        text = tokenizer.decode(ids[~np.isin(ids, special)].tolist())
        # Byte tokens may spell U+2581, SentencePiece's space. The decoder leaves it as
        # it is, three bytes, but it stands for a space.
        return len(text.replace(SPACE, " ").encode())

    # Documents are decoded one by one: a decoder may drop the space at a text's start.
    documents = np.split(row, np.flatnonzero(row == tokenizer.eot))
    # The first token of a row is an input only.
    return sum(map(size, documents)) - size(row[:1])
