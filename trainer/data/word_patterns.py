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
# Pairs of letters that equal a single letter without regard to case. `(?i:ss)` matches
# the ß of "straße" in Oniguruma, and not in Rust's engine.
LIGATURES = re.compile("(?i)ss|st|f[fil]")
# A search may take time quadratic in a text's length, so texts are short.
CHARACTERS_PER_TEXT = 16

# Merges of a probe tokenizer. Each joins two letters or digits, or an ASCII byte and
# the first or last byte of a character beyond ASCII. In `character_texts` merges do not
# overlap, so a merge is applied exactly where no word ends inside it.
PROBE_MERGES = [
    *(b"ab", b"12"),
    *(bytes(pair) for pair in itertools.product(range(0x80), range(0xC2, 0xF5))),
    *(bytes(pair) for pair in itertools.product(range(0x80, 0xC0), range(0x80))),
]


def to_hf_pattern(pattern: str) -> str:
    """Return a pattern in the spelling of tokenizer.json.

    Oniguruma reads `{1,3}+` as a repetition of the repetition. tiktoken has it only at
    the end of an alternative, where the plus can be left out.
    """
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)


@functools.cache
def splitting_difference(
    pattern: str, hf_pattern: str, *, keeps_only_matches: bool = False
) -> str | None:
    """Return a text that a pattern splits differently in Hugging Face's library.

    Args:
      pattern: tiktoken's pattern. tiktoken drops text that it does not match.
      hf_pattern: the same pattern in the spelling of Hugging Face's library.
      keeps_only_matches: whether that library drops such text too.

    Returns:
      the text, an engine's error, or a reason why such a text exists. None:
      `PROBE_TEXTS` and the characters of Unicode are split alike.
    """
    if bound := re.search(r"\\[bB]", pattern):
        # The engines disagree on which characters belong to a word, and the probe texts
        # have few ends of words.
        return f"{bound[0]} beside a superscript digit"
    if "(?i" in pattern and (pair := LIGATURES.search(pattern)):
        return f"{pair[0]} without regard to case"
    try:
        splitter = pre_tokenizers.Split(
            tokenizers.Regex(hf_pattern),
            "removed" if keeps_only_matches else "isolated",
            keeps_only_matches,
        )
        text = short_text_difference(pattern, splitter)
        return text or character_difference(pattern, splitter)
    except Exception as error:  # tokenizers raises this class only
        return str(error).splitlines()[0]


def short_text_difference(
    pattern: str, splitter: pre_tokenizers.PreTokenizer
) -> str | None:
    """Return a short text that is split differently, or None.

    The texts are `PROBE_TEXTS`, all ASCII characters, and the words in the pattern. In
    tiktoken each substring of them is a token, so that each word is one token.
    """
    ascii_texts = [f" {chr(i)}a{chr(i)}1{chr(i)}." for i in range(0x80)]
    texts = [*PROBE_TEXTS, *map("".join, itertools.batched(ascii_texts, 8))]
    for word in set(re.findall(r"[^\W\d_]+", pattern)):
        texts += [word[:64], word[:64].upper()]
    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in texts:
        for start, end in itertools.combinations(range(len(text) + 1), 2):
            ranks.setdefault(text[start:end].encode(), len(ranks))
    tiktoken_encoding = probe_encoding(pattern, ranks)
    for text in texts:
        their_words = [word.encode() for word, _ in splitter.pre_tokenize_str(text)]
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
    pattern: str, splitter: pre_tokenizers.PreTokenizer
) -> str | None:
    """Return a text with a character that is split differently, or None."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    merges = [(spell(pair[:1]), spell(pair[1:])) for pair in PROBE_MERGES]
    for pair in PROBE_MERGES:
        ranks[pair] = len(ranks)
    tiktoken_encoding = probe_encoding(pattern, ranks)
    hf_tokenizer = tokenizers.Tokenizer(
        models.BPE({spell(token): i for token, i in ranks.items()}, merges)
    )
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter, to_bytes])
    in_context, isolated = character_texts()
    for text in in_context:
        if tiktoken_encoding.encode_ordinary(text) != hf_tokenizer.encode(text).ids:
            return text
    # Ideographs are too many to compare. Check only that tiktoken drops none.
    for text in isolated:
        ids = tiktoken_encoding.encode_ordinary(text)
        if tiktoken_encoding.decode_bytes(ids) != text.encode():
            return text
    return None


@functools.cache
def character_texts() -> tuple[list[str], list[str]]:
    """Return texts with most characters beside several others, and with the rest."""
    in_context, isolated = [], []
    for i, char in enumerate(characters()):
        if char < FIRST_IDEOGRAPH or i % 64 == 0:
            in_context.append(f" {char}cab. abc{char} 123{char}312.\n")
        else:
            isolated.append(f" {char}")
    return (
        [*map("".join, itertools.batched(in_context, CHARACTERS_PER_TEXT))],
        [*map("".join, itertools.batched(isolated, CHARACTERS_PER_TEXT * 8))],
    )


def probe_encoding(pattern: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """Return the encoding of tiktoken with this pattern and these ranks."""
    # A pattern may match the empty text, which tiktoken encodes only if it is a token.
    ranks = ranks | {b"": len(ranks)}
    return tiktoken.Encoding(
        "probe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
