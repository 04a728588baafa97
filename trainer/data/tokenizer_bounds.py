"""Limits for a tokenizer that others wrote: how much longer it makes a text, and how
long its word patterns may search.

Normalizers may make a text longer. Word patterns are searched by backtracking, which
may take exponential time.
"""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trainer.errors import UserError

PARTS = ("normalizer", "pre_tokenizer", "decoder")
# The texts of these keys are inserted, or replace a character or a word.
INSERTED = (
    "content", "prepend", "prefix", "replacement",
    "continuing_subword_prefix", "end_of_word_suffix",
)  # fmt: skip
CHARSMAP = "precompiled_charsmap"
# A character may become so many. Unicode's normal forms of one have up to 18.
MAX_GROWTH = 64
MAX_PATTERN_CHARS = 4000  # The longest pattern on the hub has some 600.
MAX_REPEATS = 1000  # of an atom; the numbers of nested quantifiers are multiplied
# Quantifiers of an alternative with a variable number of repeats, and with an unbounded
# one. GPT-4o's pattern has 4 and 2.
MAX_VARIABLE, MAX_UNBOUNDED = 8, 3

# Simple patterns that match at least one character, such as transformers' ` {2,}`.
NONEMPTY_PATTERN = re.compile(
    r"(\\A)?(\\s|[^\\^$.|?*+()\[\]{}])(\+|\{[1-9]\d*(,\d*)?\})?", re.DOTALL
)
# This pattern repeats a group of variable length, but the next character decides which
# group goes on: a letter begins the outer group, and a space the inner one.
EXAONE_WORD = r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"

REGEX_TOKEN = re.compile(
    r"""(?P<refers>\\[1-9kg]|\(\?[~(&R0-9])
    |(?P<escape>\\[pPx]\{[^}]*\}|\\.)
    |(?P<group>\(\?(?:[:=!>]|<[=!]|P?<\w+>|[a-zA-Z-]*[:)])|\()
    |(?P<repeat>[*+?]|\{(?P<min>\d*)(?P<comma>,?)(?P<max>\d*)\})(?P<kind>[?+]?)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def check_growth_and_patterns(path: Path, tree: dict[str, Any]) -> None:
    """Check that a tokenizer.json makes texts little longer, and searches in time.

    Args:
      path: the file.
      tree: its content.

    Raises:
      UserError: the texts that it inserts are too long, or a pattern may be too slow.
    """
    pairs = [
        pair
        for part in (*(tree.get(name) for name in PARTS), tree.get("model"))
        for pair in texts_in(part)
    ]
    lengths = [len(text) for key, text in pairs if key in INSERTED]
    lengths += [longest_form(text) for key, text in pairs if key == CHARSMAP]
    # Parts are applied one after another, so their growths multiply.
    growth = prod(max(1, length) for length in lengths)
    if growth > MAX_GROWTH:
        raise UserError(
            f"{path} replaces a character by up to {growth:,} others, at most"
            f" {MAX_GROWTH} are expected; download it from its author, or choose"
            " another tokenizer"
        )
    for key, text in pairs:
        if key == "Regex":
            check_pattern_speed(path, text)


def longest_form(charsmap: str) -> int:
    """Return the length of the longest text in SentencePiece's table of normal forms.

    The table, in base64, has the size of a trie, the trie, and texts that end with NUL.
    """
    data = base64.b64decode(charsmap)
    trie = int.from_bytes(data[:4], "little")
    texts = data[4 + trie :].split(b"\0")
    # Characters and not bytes: the longest form of NFKC has 18, in 33 bytes.
    return max(len(text.decode(errors="replace")) for text in texts)


def texts_in(part: Any) -> list[tuple[str, str]]:
    """Return all texts in a part with their keys, except for vocabulary and merges."""
    if isinstance(part, list):
        return [pair for inner in part for pair in texts_in(inner)]
    if not isinstance(part, dict):
        return []
    may_insert = part.get("type") == "Replace" and may_match_empty(part["pattern"])
    pairs = []
    for key, value in part.items():
        if isinstance(value, str):
            # If the pattern matches the empty text, the content is inserted and the
            # character beside it stays. The added space counts that character.
            is_inserted = may_insert and key == "content"
            pairs.append((key, f" {value}" if is_inserted else value))
        # Tokens insert nothing, and may be hundreds of thousands.
        elif key not in ("vocab", "merges"):
            pairs += texts_in(value)
    return pairs


def may_match_empty(pattern: dict[str, str]) -> bool:
    """Return whether a pattern of Replace may match between characters."""
    regex = pattern.get("Regex")
    if regex is None:
        return not pattern.get("String")
    return not NONEMPTY_PATTERN.fullmatch(regex)


@dataclass
class Atom:
    """A part of a pattern that a quantifier may repeat, or an open group.

    Attributes:
      has_variable_length: whether it may match texts of several lengths.
      repeats: the largest repeat count inside; counts of nested quantifiers are
          multiplied.
    """

    has_variable_length: bool = False
    repeats: int = 1

    def add(self, atom: "Atom") -> None:
        """Take an atom into this group."""
        self.has_variable_length |= atom.has_variable_length
        self.repeats = max(self.repeats, atom.repeats)


def check_pattern_speed(path: Path, pattern: str) -> None:
    """Raise UserError for a word pattern whose search may take exponential time.

    Args:
      path: the file that has the pattern.
      pattern: a regular expression of Oniguruma or of fancy-regex.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        problem: str | None = f"has more than {MAX_PATTERN_CHARS:,} characters"
    else:
        problem = slow_search(pattern.replace(EXAONE_WORD, r"\p{L}+"))
    if problem is not None:
        raise UserError(
            f"{path}: the word pattern {pattern[:80]!r} {problem}, and may search for"
            " ever; download it from its author, or choose another tokenizer"
        )


def pattern_parts(pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield the parts of a regular expression, each after its kind.

    Kinds are reference, flags, open, close, or, repeat and atom. A set of characters,
    which may hold further sets in Oniguruma, is one atom.
    """
    brackets = 0
    for part in REGEX_TOKEN.finditer(pattern):
        text = part[0]
        kind = {")": "close", "|": "or"}.get(text, "atom")
        if brackets or text == "[":
            brackets += (text == "[") - (text == "]")
            if brackets:
                continue
            kind = "atom"
        elif part["refers"]:
            kind = "reference"
        elif part["group"]:
            kind = "flags" if text.endswith(")") else "open"
        elif part["repeat"]:
            kind = "repeat"
        yield kind, part


def slow_search(pattern: str) -> str | None:
    """Return why the search by a pattern may take exponential time; None: it does not.

    A slow pattern repeats a group of variable length, as in `(a+)+`, has many
    quantifiers one after another, or refers to a group. A search by another pattern may
    still take a time that grows with a power of the text's length.
    """
    open_groups = [Atom()]
    # The atom that a quantifier would repeat; None: there is none.
    atom: Atom | None = None
    variable_quantifiers = unbounded_quantifiers = 0
    for kind, part in pattern_parts(pattern):
        if kind == "reference":
            return "refers to one of its groups"
        # With the flag x, spaces may stand between an atom and its quantifier. An x
        # after "<" is in a group's name.
        flags, _, _ = part[0].partition("<")
        if kind in ("flags", "open") and "x" in flags:
            return "has the flag x"
        if kind == "flags":
            continue
        if kind == "open":
            open_groups.append(Atom())
            if len(open_groups) > 20:
                return "has more than 20 nested groups"
        elif kind == "close" and len(open_groups) > 1:
            atom = open_groups.pop()
            open_groups[-1].add(atom)
        elif kind == "or":
            if len(open_groups) == 1:
                variable_quantifiers = unbounded_quantifiers = 0
            else:
                open_groups[-1].has_variable_length = True
            atom = None
        elif kind == "repeat" and atom is not None:
            minimum, maximum = bounds_of(part)
            repeats = maximum is None or maximum > 1
            # Oniguruma reads `{1,3}+` as a repetition of a repetition. At the end of an
            # alternative `to_hf_pattern` drops the plus.
            is_double = part["kind"] == "+" and part["min"] is not None
            is_at_end = pattern[part.end() :][:1] in ("", "|")
            if (repeats and atom.has_variable_length) or (is_double and not is_at_end):
                return "repeats a group of several lengths"
            if minimum != maximum:
                variable_quantifiers += 1
                unbounded_quantifiers += maximum is None
            # One more quantifier would repeat this repetition.
            count = max(1, minimum, maximum or 0)
            atom = Atom(minimum != maximum, atom.repeats * count)
            open_groups[-1].add(atom)
        else:
            atom = Atom()
        # A search may try all ways to share a text among quantifiers in a row: `a?` 30
        # times before 30 times `a` takes 2^30 tries.
        if variable_quantifiers > MAX_VARIABLE or unbounded_quantifiers > MAX_UNBOUNDED:
            return "has too many quantifiers one after another"
        # An engine may compile a copy of the part for each repeat.
        if open_groups[-1].repeats > MAX_REPEATS:
            return f"repeats a part more than {MAX_REPEATS:,} times"
    return None


def bounds_of(part: re.Match[str]) -> tuple[int, int | None]:
    """Return how often a quantifier repeats, at least and at most (None: no limit)."""
    if part["min"] is None:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[part["repeat"]]
    minimum = int(part["min"] or 0)
    if not part["comma"]:
        return minimum, minimum
    return minimum, int(part["max"]) if part["max"] else None
