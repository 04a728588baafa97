"""Limits for a tokenizer that others wrote: how much longer it makes a text, and how
long its word patterns may search.

Normalizers may make a text longer. Word patterns are searched by backtracking, which
may take exponential time.
"""

import base64
import re
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
# Characters that replace one. Llama 2 has 1, and Unicode's own forms up to 18.
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


def check_tokenizer_json(path: Path, tree: dict[str, Any]) -> None:
    """Refuse a tokenizer.json that may make texts much longer, or search for ever.

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
            check_pattern(path, text)


def longest_form(charsmap: str) -> int:
    """Return the length of the longest text in SentencePiece's table of normal forms.

    The table, in base64, has the size of a trie, the trie, and texts that end with NUL.
    """
    data = base64.b64decode(charsmap)
    trie = int.from_bytes(data[:4], "little")
    texts = data[4 + trie :].split(b"\0")
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
class PatternGroup:
    """An open group of a pattern, or an atom.

    Attributes:
      has_variable_length: whether it may match texts of several lengths.
      repeats: the largest repeat count inside; counts of nested quantifiers are
          multiplied.
    """

    has_variable_length: bool = False
    repeats: int = 1


def check_pattern(path: Path, pattern: str) -> None:
    """Refuse a word pattern whose search may take exponential time.

    Such a pattern repeats a group of variable length, as in `(a+)+`, has many
    quantifiers one after another, or refers to a group. A search by an accepted pattern
    may still take a time that grows with a power of the text's length.

    Args:
      path: the file that has the pattern.
      pattern: a regular expression of Oniguruma or of fancy-regex.
    """

    def refusal(why: str) -> UserError:
        return UserError(
            f"{path}: the word pattern {pattern[:80]!r} {why}, and may search for ever;"
            " download it from its author, or choose another tokenizer"
        )

    if len(pattern) > MAX_PATTERN_CHARS:
        raise refusal(f"has more than {MAX_PATTERN_CHARS:,} characters")
    pattern = pattern.replace(EXAONE_WORD, r"\p{L}+")
    open_groups = [PatternGroup()]
    # The atom that a quantifier would repeat; None: there is none.
    atom: PatternGroup | None = None
    variable_quantifiers = unbounded_quantifiers = brackets = 0
    for part in REGEX_TOKEN.finditer(pattern):
        text = part[0]
        if brackets or text == "[":
            # This is a set of characters. In Oniguruma it may hold further sets.
            brackets += (text == "[") - (text == "]")
            atom = PatternGroup()
        elif part["refers"]:
            raise refusal("refers to one of its groups")
        elif part["group"]:
            if "x" in text.partition("<")[0]:
                # With this flag, spaces may stand between an atom and its quantifier.
                raise refusal("has the flag x")
            if text.endswith(")"):  # flags without a group, such as (?i)
                continue
            open_groups.append(PatternGroup())
            if len(open_groups) > 20:
                raise refusal("has more than 20 nested groups")
        elif text == ")" and len(open_groups) > 1:
            atom = open_groups.pop()
            open_groups[-1].has_variable_length |= atom.has_variable_length
            open_groups[-1].repeats = max(open_groups[-1].repeats, atom.repeats)
        elif text == "|":
            if len(open_groups) == 1:
                variable_quantifiers = unbounded_quantifiers = 0
            else:
                open_groups[-1].has_variable_length = True
            atom = None
        elif part["repeat"] and atom is not None:
            minimum, maximum = bounds_of(part)
            repeats = maximum is None or maximum > 1
            # Oniguruma reads `{1,3}+` as a repetition of a repetition. At the end of an
            # alternative `to_hf_pattern` drops the plus.
            is_double = part["kind"] == "+" and part["min"] is not None
            is_at_end = pattern[part.end() :][:1] in ("", "|")
            if (repeats and atom.has_variable_length) or (is_double and not is_at_end):
                raise refusal("repeats a group of several lengths")
            if minimum != maximum:
                variable_quantifiers += 1
                unbounded_quantifiers += maximum is None
                open_groups[-1].has_variable_length = True
            atom.repeats *= max(1, minimum, maximum or 0)
            open_groups[-1].repeats = max(open_groups[-1].repeats, atom.repeats)
            # One more quantifier would repeat this repetition.
            atom = PatternGroup(minimum != maximum, atom.repeats)
        else:
            atom = PatternGroup()
        if variable_quantifiers > MAX_VARIABLE or unbounded_quantifiers > MAX_UNBOUNDED:
            raise refusal("has too many quantifiers one after another")
        if open_groups[-1].repeats > MAX_REPEATS:
            raise refusal(f"repeats a part more than {MAX_REPEATS:,} times")


def bounds_of(part: re.Match[str]) -> tuple[int, int | None]:
    """Return how often a quantifier repeats, at least and at most (None: no limit)."""
    if part["min"] is None:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[part["repeat"]]
    minimum = int(part["min"] or 0)
    if not part["comma"]:
        return minimum, minimum
    return minimum, int(part["max"]) if part["max"] else None
