"""Cut a long text at starts of lines so that its pieces have the ids of the whole text.

A cut is proven for the parts of tokenizers that are listed here. With any other part,
such as words of a fixed number of characters, a text has to be encoded whole.
"""

import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from trainer.data.bpe_files import added_ids, is_bpe, keeps_words
from trainer.data.word_patterns import BY_HF_PATTERN

# The start of a line with an ASCII letter, after a line that ends in a printable ASCII
# character. A line-safe pattern never matches across it, since none of its words has a
# letter after a newline. Cut there, a text ends with the newline, which the pattern
# matches at the end of a text as it does before a letter.
LINE_START = re.compile(r"(?<=[!-~]\n)(?=[A-Za-z])")

# Normalizers that only look at neighboring characters, or at a run of spaces.
NORMALIZERS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"),
    *("BertNormalizer", "Precompiled", "Prepend", "Strip", "Replace"),
}
SPLIT_AT_LINES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
LOCAL_PRE_TOKENIZERS = {"Metaspace", "Punctuation", "Digits", "ByteLevel", "Split"}
# A newline, or GPT-2's spelling of one, before another character.
NEWLINE_INSIDE = re.compile("[\n\u010a][^\n\u010a]")
# transformers' converters write this pattern for a run of spaces.
SPACES = " {2,}"


def cut_at_lines(text: str, size: int) -> list[str]:
    """Cut a text at the first LINE_START after every `size` characters."""
    pieces, start = [], 0
    while match := LINE_START.search(text, start + size):
        pieces.append(text[start : match.start()])
        start = match.start()
    return [*pieces, text[start:]]


def is_line_safe(tree: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> bool:
    """Return whether pieces that begin at LINE_STARTs have the ids of the whole text.

    Each piece is encoded together with some of the text around it.
    """
    pre_tokenizers = list(parts_of(tree.get("pre_tokenizer")))
    known_types = SPLIT_AT_LINES | LOCAL_PRE_TOKENIZERS
    has_local_parts = (
        # An added word may be matched across a cut. Words of newlines alone, such as
        # Gemma's, end where a line starts.
        not any(map(NEWLINE_INSIDE.search, added_ids(tree)))
        and all(is_local(p, NORMALIZERS) for p in parts_of(tree.get("normalizer")))
        and all(is_local(part, known_types) for part in pre_tokenizers)
    )
    line_end = normalized_line_end(tokenizer)
    if not has_local_parts or line_end is None:
        return False
    if any(map(splits_at_lines, pre_tokenizers)):
        return True
    if line_end == "\n":
        # A word may span lines. But no merge crosses a line's end if no token has a
        # newline before another character.
        return is_bpe(tree["model"]) and not any(
            map(NEWLINE_INSIDE.search, tree["model"]["vocab"])
        )
    # A line end is a space, and only Metaspace ends a word there.
    return any(
        part["type"] == "Metaspace" and part.get("split", True)
        for part in pre_tokenizers
    )


def normalized_line_end(tokenizer: tokenizers.Tokenizer) -> str | None:
    """Return what the normalizer makes of a newline: itself, or a space.

    None: something else or nothing, so that a word may span two lines.
    """
    normalizer = tokenizer.normalizer
    text = "a\nb" if normalizer is None else normalizer.normalize_str("a\nb")
    line_end = re.search("a([\n \u2581])b", text)
    return None if line_end is None else line_end[1]


def parts_of(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or pre-tokenizer, which may be a sequence."""
    if part is None:
        return
    inner = part.get("normalizers", part.get("pretokenizers"))
    if inner is None:
        yield part
        return
    for inner_part in inner:
        yield from parts_of(inner_part)


def is_local(part: dict[str, Any], types: set[str]) -> bool:
    """Return whether a part has one of these types, and a pattern that is known to look
    only at neighboring characters.
    """
    pattern = part.get("pattern", {})
    if regex := pattern.get("Regex"):
        is_known = (
            regex == SPACES if part["type"] == "Replace" else splits_at_lines(part)
        )
        return part["type"] in types and is_known
    # Where newlines are replaced, or inserted, lines start at other places.
    texts = pattern.get("String", "") + str(part.get("content", ""))
    return part["type"] in types and "\n" not in texts


def splits_at_lines(part: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer ends a word at each LINE_START."""
    if part["type"] == "Split":
        return keeps_words(part) and part["pattern"].get("Regex") in BY_HF_PATTERN
    by_regex = part["type"] == "ByteLevel" and part.get("use_regex", True)
    return by_regex or part["type"] in SPLIT_AT_LINES
