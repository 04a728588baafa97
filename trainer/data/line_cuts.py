"""Cut a long text at starts of lines so that its pieces have the ids of the whole text.

A cut is proven for the parts of tokenizers that are listed here. With any other part,
such as words of a fixed number of characters, a text has to be encoded whole.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from trainer.data.bpe_files import is_bpe, known_settings, special_in
from trainer.data.word_patterns import for_hugging_face

# Between a line that ends in a printable ASCII character and one that starts with a
# letter, no token of a line-safe pattern crosses the boundary. No token holds a newline
# followed by a letter, and a newline alone is matched alike before a letter and at the
# end of the text.
LINE_START = re.compile(r"(?<=[!-~]\n)(?=[A-Za-z])")

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Llama 3's and Qwen2's patterns, which no encoding of tiktoken has
HUB_PATTERNS = tuple(
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)

# Normalizers that look at neighboring characters only, or at a run of spaces
NORMALIZERS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"),
    *("BertNormalizer", "Precompiled", "Prepend", "Strip", "Replace"),
}
SPLIT_AT_LINES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
LOCAL_PRE_TOKENIZERS = {"Metaspace", "Punctuation", "Digits", "ByteLevel", "Split"}
CROSSING = re.compile("[\n\u010a][^\n\u010a]")  # a newline, also GPT-2's, in a token
SPACES = " {2,}"  # the regular expression of transformers' converters


def cut_at_lines(text: str, size: int) -> list[str]:
    """Cut a text at the first LINE_START after every `size` characters."""
    pieces, start = [], 0
    while match := LINE_START.search(text, start + size):
        pieces.append(text[start : match.start()])
        start = match.start()
    return [*pieces, text[start:]]


@functools.cache
def line_safe_patterns() -> frozenset[str]:
    """Return the word patterns for which `LINE_START` is a token boundary."""
    names = ("r50k_base", "cl100k_base", "o200k_base")
    *others, gpt4o = (known_settings(name, {})["pat_str"] for name in names)
    mistral = gpt4o.replace(f"{CONTRACTIONS}?", "").replace("{1,3}", "")
    return frozenset([*HUB_PATTERNS, *others, gpt4o, mistral])


def is_line_safe(tree: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> bool:
    """Return whether pieces that begin at LINE_STARTs have the ids of the whole text.

    The pieces are encoded with some text around them.
    """
    normalizers = list(parts_of(tree.get("normalizer")))
    words = list(parts_of(tree.get("pre_tokenizer")))
    if any(map(CROSSING.search, special_in(tree))):
        return False
    if not all(is_local(part, NORMALIZERS) for part in normalizers):
        return False
    if not all(is_local(part, SPLIT_AT_LINES | LOCAL_PRE_TOKENIZERS) for part in words):
        return False
    normalizer = tokenizer.normalizer
    text = "a\nb" if normalizer is None else normalizer.normalize_str("a\nb")
    line_end = re.search("a([\n \u2581])b", text)
    # The normalizer drops line ends, so a word may span two lines.
    if line_end is None:
        return False
    if any(map(splits_at_lines, words)):
        return True
    if line_end[1] != "\n":
        return any(
            part["type"] == "Metaspace" and part.get("split", True) for part in words
        )
    # A word may span lines. But if no token has a newline before its end, no merge
    # crosses a line's end.
    return is_bpe(tree["model"]) and not any(
        map(CROSSING.search, tree["model"]["vocab"])
    )


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
    """Return whether a part is of these types, and looks at neighboring characters
    only.
    """
    pattern = part.get("pattern", {})
    if regex := pattern.get("Regex"):
        is_known = (
            regex == SPACES if part["type"] == "Replace" else splits_at_lines(part)
        )
        return part["type"] in types and is_known
    texts = pattern.get("String", "") + str(part.get("content", ""))
    return part["type"] in types and "\n" not in texts


def splits_at_lines(part: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer ends a word at each LINE_START."""
    if part["type"] == "Split":
        known = {for_hugging_face(pattern) for pattern in line_safe_patterns()}
        kind = (part["behavior"], bool(part["invert"]))
        keeps_words = kind in (("Isolated", False), ("Removed", True))
        return keeps_words and part["pattern"].get("Regex") in known
    by_regex = part["type"] == "ByteLevel" and part.get("use_regex", True)
    return by_regex or part["type"] in SPLIT_AT_LINES
