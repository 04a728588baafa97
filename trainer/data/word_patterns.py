"""Word patterns in two regex engines: tiktoken's, and that of Hugging Face's library.

In Oniguruma, the engine of that library, POSIX classes hold the letters of all scripts,
and `^` and `$` match the ends of a line. In Rust's engine, which tiktoken uses, POSIX
classes hold ASCII letters, and `^` and `$` match the ends of the text. They also differ
in the characters of `\\w`, in `{1,3}+`, and in letters that are equal but for their
case.
"""

import functools
import itertools
import re
import sys
import unicodedata

import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers

from trainer.data.byte_spelling import spell

# Texts on which word patterns differ: spaces, line ends, digits, signs, letter case.
PROBE_TEXTS = (
    *("Hello, I'M it's don't we'LL '\u017f", "  two   spaces\t\ttabs \n\n\n", "a"),
    *("def f(x):\n    return x\n\n\n  end", "line one\nline two", "x\r\n\r\n y\r", " "),
    *("1234567 3.14 a1b2 1,000,000 _x_", "camelCase XMLFile //... != -5%", "\n\na\n"),
)
UNNAMED = ("Cs", "Co", "Cn")  # surrogates, private use, unassigned
FIRST_IDEOGRAPH = "\u3400"  # from here on most characters are ideographs
# Pairs of letters that equal a single one without regard to case: in "straße",
# `(?i:ss)` has a match in Oniguruma, and none in Rust's engine.
LIGATURES = re.compile("(?i)ss|st|f[fil]")
CHARACTERS_PER_TEXT = 16  # A search may take the square of a text's length.

# Merges of a probe tokenizer: of an ASCII byte with the first or the last byte of a
# character beyond ASCII, and of two letters or digits. In `character_texts` they do not
# overlap, so a merge is applied exactly where no word ends inside it.
PROBE_MERGES = [
    *(b"ab", b"12"),
    *(bytes(pair) for pair in itertools.product(range(0x80), range(0xC2, 0xF5))),
    *(bytes(pair) for pair in itertools.product(range(0x80, 0xC0), range(0x80))),
]


def for_hugging_face(pattern: str) -> str:
    """Return a pattern in the spelling of tokenizer.json.

    Its regex engine reads `{1,3}+` as a repetition of the repetition. Where tiktoken
    writes it, at the end of an alternative, the plus can be left out.
    """
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)


@functools.cache
def splitting_difference(
    pattern: str, hf_pattern: str, *, matches: bool = False
) -> str | None:
    """Return a text that a pattern splits differently in Hugging Face's library.

    Args:
      pattern: tiktoken's. tiktoken drops the text that it does not match.
      hf_pattern: the same pattern in that library's spelling.
      matches: whether that library drops the text that is not matched, too.

    Returns:
      the text, an engine's error, or a reason why there is such a text. None: short
      texts and the characters of Unicode are split alike.
    """
    if bound := re.search(r"\\[bB]", pattern):
        # The engines differ in the characters of a word. The probe texts have few ends
        # of words.
        return f"{bound[0]} beside a superscript digit"
    if "(?i" in pattern and (pair := LIGATURES.search(pattern)):
        return f"{pair[0]} without regard to case"
    try:
        words = pre_tokenizers.Split(
            tokenizers.Regex(hf_pattern), "removed" if matches else "isolated", matches
        )
        text = short_text_difference(pattern, words)
        return text or character_difference(pattern, words)
    except Exception as error:  # tokenizers raises this class only
        return str(error).splitlines()[0]


def short_text_difference(
    pattern: str, words: pre_tokenizers.PreTokenizer
) -> str | None:
    """Return a text of `PROBE_TEXTS` or a word of the pattern that is split
    differently, or None.

    In tiktoken each substring of the texts is a token, so that each word is one token.
    """
    ascii_ = [f" {chr(i)}a{chr(i)}1{chr(i)}." for i in range(0x80)]
    texts = [*PROBE_TEXTS, *map("".join, itertools.batched(ascii_, 8))]
    for word in set(re.findall(r"[^\W\d_]+", pattern)):
        texts += [word[:64], word[:64].upper()]
    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in texts:
        for start, end in itertools.combinations(range(len(text) + 1), 2):
            ranks.setdefault(text[start:end].encode(), len(ranks))
    tiktoken_encoding = encoding(pattern, ranks)
    for text in texts:
        their_words = [word.encode() for word, _ in words.pre_tokenize_str(text)]
        ids = tiktoken_encoding.encode_ordinary(text)
        if tiktoken_encoding.decode_tokens_bytes(ids) != their_words:
            return text
    return None


@functools.cache
def characters() -> list[str]:
    """Return all named characters of Unicode, and two without a name."""
    every_char = map(chr, range(sys.maxunicode + 1))
    named = [char for char in every_char if unicodedata.category(char) not in UNNAMED]
    return [*named, "\u0378", "\ue000"]


def character_difference(
    pattern: str, words: pre_tokenizers.PreTokenizer
) -> str | None:
    """Return a text with a character that is split differently, or None."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    merges = [(spell(pair[:1]), spell(pair[1:])) for pair in PROBE_MERGES]
    for pair in PROBE_MERGES:
        ranks[pair] = len(ranks)
    tiktoken_encoding = encoding(pattern, ranks)
    hf_tokenizer = tokenizers.Tokenizer(
        models.BPE({spell(token): i for token, i in ranks.items()}, merges)
    )
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    beside_others, alone = character_texts()
    for text in beside_others:
        if tiktoken_encoding.encode_ordinary(text) != hf_tokenizer.encode(text).ids:
            return text
    for text in alone:
        ids = tiktoken_encoding.encode_ordinary(text)
        if tiktoken_encoding.decode_bytes(ids) != text.encode():
            return text
    return None


@functools.cache
def character_texts() -> tuple[list[str], list[str]]:
    """Return texts with most characters beside several others, and with the rest."""
    beside_others, alone = [], []
    for i, char in enumerate(characters()):
        if char < FIRST_IDEOGRAPH or i % 64 == 0:
            beside_others.append(f" {char}cab. abc{char} 123{char}312.\n")
        else:
            alone.append(f" {char}")
    return (
        [*map("".join, itertools.batched(beside_others, CHARACTERS_PER_TEXT))],
        [*map("".join, itertools.batched(alone, CHARACTERS_PER_TEXT * 8))],
    )


def encoding(pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """Return tiktoken's encoding of words by `ranks`."""
    # A pattern may match nothing, which tiktoken can only encode as a token.
    ranks = ranks | {b"": len(ranks)}
    return tiktoken.Encoding(
        "probe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
