"""Bounds on what a tokenizer's file makes of a text: how much longer, and how slowly.

Its normalizers replace parts of a text by others, and its word patterns are searched by
backtracking. Both are written by somebody else.
"""

import base64
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trainer.errors import UserError

PARTS = ("normalizer", "pre_tokenizer", "decoder")
# Texts of these keys take the place of a character, of a word, or of nothing.
INSERTED = (
    "content", "prepend", "prefix", "replacement",
    "continuing_subword_prefix", "end_of_word_suffix",
)  # fmt: skip
CHARSMAP = "precompiled_charsmap"
MOST_GROWTH = 64  # characters for one; Llama 2 has 1, and Unicode's own forms up to 18
MOST_PATTERN = 4000  # characters; the longest of the hub has some 600
MOST_REPEATS = 1000  # of a part with a fixed number of them
MOST_VARIABLE, MOST_UNBOUNDED = 8, 3  # quantifiers of an alternative; GPT-4o's has 4, 2

# Some of the patterns that take a character at least, as ` {2,}` of transformers' does.
TAKES_TEXT = re.compile(
    r"(\\A)?(\\s|[^\\^$.|?*+()\[\]{}])(\+|\{[1-9]\d*(,\d*)?\})?", re.DOTALL
)
# EXAONE's word. It repeats a group of several lengths, but the next character decides:
# a letter begins the outer group, and a space the inner one.
DECIDED = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"

# A part of a pattern: an escape, a group's beginning, a quantifier, or a character.
PART = re.compile(
    r"""(?P<refers>\\[1-9kg]|\(\?[~(&R0-9])
    |(?P<escape>\\[pPx]\{[^}]*\}|\\.)
    |(?P<group>\(\?(?:[:=!>]|<[=!]|P?<\w+>|[a-zA-Z-]*[:)])|\()
    |(?P<repeat>[*+?]|\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\})(?P<kind>[?+]?)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def check_tree(path: Path, tree: dict[str, Any]) -> None:
    """Refuse a tokenizer.json that multiplies a text or searches it for ever.

    Args:
      path: of the file.
      tree: its content.

    Raises:
      UserError: the texts that it inserts are too long, or a pattern is too slow.
    """
    pairs = [
        pair
        for part in (*(tree.get(name) for name in PARTS), tree.get("model"))
        for pair in texts_in(part)
    ]
    lengths = [len(text) for key, text in pairs if key in INSERTED]
    lengths += [longest_in(text) for key, text in pairs if key == CHARSMAP]
    growth = prod(max(1, length) for length in lengths)
    if growth > MOST_GROWTH:
        raise UserError(
            f"{path} replaces a character by up to {growth:,} others, at most"
            f" {MOST_GROWTH} are expected; download it from its author, or choose"
            " another tokenizer"
        )
    for key, text in pairs:
        if key == "Regex":
            check_pattern(path, text)


def longest_in(charsmap: str) -> int:
    """Return the characters of the longest text in SentencePiece's table of forms.

    The table, in base64, is the size of a trie, the trie, and texts that end with NUL.
    """
    data = base64.b64decode(charsmap)
    trie = int.from_bytes(data[:4], "little")
    texts = data[4 + trie :].split(b"\0")
    return max(len(text.decode(errors="replace")) for text in texts)


def texts_in(part: Any) -> list[tuple[str, str]]:
    """Return the key and the text of each text in a part, but not its vocabulary."""
    if isinstance(part, list):
        return [pair for inner in part for pair in texts_in(inner)]
    if not isinstance(part, dict):
        return []
    is_added = part.get("type") == "Replace" and may_match_nothing(part["pattern"])
    pairs = []
    for key, value in part.items():
        if isinstance(value, str):
            # Where a pattern matches nothing, the content is added to a character.
            is_longer = is_added and key == "content"
            pairs.append((key, f" {value}" if is_longer else value))
        elif key not in ("vocab", "merges"):
            pairs += texts_in(value)
    return pairs


def may_match_nothing(pattern: dict[str, str]) -> bool:
    """Return whether a pattern of Replace may match between characters."""
    regex = pattern.get("Regex")
    if regex is None:
        return not pattern.get("String")
    return not TAKES_TEXT.fullmatch(regex)


@dataclass
class Group:
    """A group of a pattern, as far as it was read.

    Attributes:
      varies: whether it may match one text in several ways.
      repeats: of its parts with a fixed number of them, multiplied.
    """

    varies: bool = False
    repeats: int = 1


def check_pattern(path: Path, pattern: str) -> None:
    """Refuse a word pattern whose search may take exponential time.

    That is one that repeats a group of which it does not know the length, as in
    `(a+)+`, has many quantifiers one after another, or refers to a group. A pattern
    that is accepted may still take time of a power of a text's length.

    Args:
      path: the file that it is in.
      pattern: a regular expression of Oniguruma or of fancy-regex.
    """

    def refuse(why: str) -> UserError:
        return UserError(
            f"{path}: the word pattern {pattern[:80]!r} {why}, and may search for ever;"
            " download it from its author, or choose another tokenizer"
        )

    if len(pattern) > MOST_PATTERN:
        raise refuse(f"has more than {MOST_PATTERN:,} characters")
    pattern = pattern.replace(DECIDED, r"\p{L}+")
    outer = [Group()]
    last: Group | None = None  # what a quantifier would repeat; None: nothing
    variable = unbounded = brackets = 0
    for part in PART.finditer(pattern):
        text = part[0]
        if brackets or text == "[":
            # A set of characters; in Oniguruma it may hold other ones.
            brackets += (text == "[") - (text == "]")
            last = Group()
        elif part["refers"]:
            raise refuse("refers to one of its groups")
        elif part["group"]:
            if "x" in text.partition("<")[0]:
                # Then a quantifier may stand apart from what it repeats.
                raise refuse("has the flag x")
            if text.endswith(")"):  # flags without a group, such as (?i)
                continue
            outer.append(Group())
            if len(outer) > 20:
                raise refuse("has more than 20 nested groups")
        elif text == ")" and len(outer) > 1:
            last = outer.pop()
            outer[-1].varies |= last.varies
            outer[-1].repeats = max(outer[-1].repeats, last.repeats)
        elif text == "|":
            if len(outer) == 1:
                variable = unbounded = 0
            else:
                outer[-1].varies = True
            last = None
        elif part["repeat"] and last is not None:
            least, most = bounds_of(part)
            repeats = most is None or most > 1
            # To Oniguruma, `{1,3}+` is the repetition of a repetition.
            is_twice = part["kind"] == "+" and part["least"] is not None
            is_last = pattern[part.end() :][:1] in ("", "|")
            if (repeats and last.varies) or (is_twice and not is_last):
                raise refuse("repeats a group of several lengths")
            if least != most:
                variable, unbounded = variable + 1, unbounded + (most is None)
                outer[-1].varies = True
            last.repeats *= max(1, least, most or 0)
            outer[-1].repeats = max(outer[-1].repeats, last.repeats)
            # One more quantifier would repeat this repetition.
            last = Group(least != most, last.repeats)
        else:
            last = Group()
        if variable > MOST_VARIABLE or unbounded > MOST_UNBOUNDED:
            raise refuse("has too many quantifiers one after another")
        if outer[-1].repeats > MOST_REPEATS:
            raise refuse(f"repeats a part more than {MOST_REPEATS:,} times")


def bounds_of(part: re.Match[str]) -> tuple[int, int | None]:
    """Return how often a quantifier repeats, at least and at most (None: no limit)."""
    if part["least"] is None:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[part["repeat"]]
    least = int(part["least"] or 0)
    if not part["comma"]:
        return least, least
    return least, int(part["most"]) if part["most"] else None
