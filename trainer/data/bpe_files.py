"""Readers of byte-pair encodings in local files, as tiktoken.Encoding.

tiktoken encodes several times as fast as Hugging Face's `tokenizers`, with the same
ids. Its own readers cache local files under a hash of their path. So they would return
the old content of a file that was replaced; these readers read the file.
"""

import base64
import binascii
import heapq
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import ENDOFTEXT

from trainer.data.byte_spelling import BYTE_LEVEL, SPELLING, unspell
from trainer.data.tokenizer_bounds import check_pattern_speed
from trainer.data.tokenizer_settings import (
    SAVE_AGAIN,
    SETTINGS,
    check_no_tokens_added,
    end_token,
    read_beside,
    read_bytes,
    read_json,
)
from trainer.data.word_patterns import BY_HF_PATTERN, ENCODINGS, GPT2, RANKS
from trainer.errors import UserError
from trainer.files import has_file

# A file of merges in order of priority, and one of ids, whose order a model may choose:
# OpenAI's names and Hugging Face's.
MERGES_AND_IDS_FILES = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))

# Where tokenizer_config.json names no class, transformers infers it from the model
# type. These classes do not split words as GPT-2 does.
CLASS_OF_MODEL_TYPE = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
# Prefixes of transformers' classes that split words by GPT-2's pattern.
WITH_GPT2_PATTERN = ("GPT2", "Roberta", "Bart", "PreTrained")

# With these keys a character has another token inside a word than at its end.
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")

# Bytes of a token. GPT-2's longest has 128.
MAX_TOKEN_BYTES = 1024

TokenIds = dict[bytes, int]
Pair = tuple[bytes, bytes]


def read_tiktoken(path: Path) -> tuple[tiktoken.Encoding, str]:
    """Return the encoding of a .tiktoken file, and the token that ends a document."""
    ranks: TokenIds = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if not line:  # tiktoken skips empty lines, too.
            continue
        try:
            encoded, rank = line.split()
            # By default b64decode leaves out characters outside of the alphabet, so a
            # damaged line would be another token.
            token = base64.b64decode(encoded, validate=True)
            # tiktoken's reader would keep the last of two ranks.
            if ranks.setdefault(token, int(rank)) != int(rank):
                raise ValueError
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}, line {number}: expected a token in base64 and its rank, each"
                " token once"
            ) from None
    if (longest := max(map(len, ranks), default=0)) > MAX_TOKEN_BYTES:
        raise UserError(
            f"{path} has a token of {longest:,} bytes, of at most {MAX_TOKEN_BYTES:,};"
            " download it from its author"
        )
    pattern, special, end = tiktoken_settings(path, len(ranks))
    # An invented end behind all ids would be an untrained row of given weights, or one
    # id more than they have rows.
    if not special:
        raise UserError(
            f"{path} has no special tokens, so none ends a document; name one, such as"
            f" {ENDOFTEXT!r}, with its id in the special_tokens of"
            f" {path.with_suffix('.json').name}"
        )
    if end is None:
        end = end_token(path.parent, special)
    if end not in special:
        problem = f"names the end {end!r}, which is none of its special tokens"
        if end is None:
            problem = "names no token that ends a document"
        raise UserError(
            f"{path} {problem}; put {SETTINGS} beside it, with an eos_token that is one"
            f" of its special tokens ({', '.join(sorted(map(repr, special))[:8])})"
        )
    return make_encoding(path, ranks, pattern, special), end


def tiktoken_settings(path: Path, count: int) -> tuple[str, dict[str, int], str | None]:
    """Return pattern, special tokens and end-of-text of a .tiktoken file.

    The .json file beside it has them, or tiktoken's encoding of the same name. The end
    is None if neither names it.

    Raises:
      UserError: neither has them, or they are of another number of tokens than `count`,
        those of the file, which may have been cut.
    """
    json_file = path.with_suffix(".json")
    if has_file(json_file):
        tree = read_json(json_file)
        pattern, special = tree.get("pat_str"), tree.get("special_tokens")
        if not (isinstance(pattern, str) and pattern and isinstance(special, dict)):
            raise UserError(
                f"{json_file}: expected the keys pat_str (a pattern) and special_tokens"
                " (text to id)"
            )
        # A file that was cut at the end of a line reads well, as a smaller vocabulary.
        check_count(path, count, tree.get("ranks"))
        return pattern, special, tree.get("eos_token")
    # The file holds ranks alone. With GPT-2's pattern, another encoding's ranks would
    # give other ids without an error.
    if path.stem not in ENCODINGS:
        raise UserError(
            f"{path} does not say how a text is split into words; put"
            f" {json_file.name} beside it, with the keys pat_str (a pattern) and"
            " special_tokens (text to id), or rename it after its encoding:"
            f" {', '.join(sorted(ENCODINGS))}"
        )
    check_count(path, count, RANKS[path.stem])
    return *ENCODINGS[path.stem], None


def check_count(path: Path, count: int, expected: Any) -> None:
    """Raise UserError for another number of tokens than expected; None: any number."""
    if expected not in (None, count):
        raise UserError(
            f"{path} has {count:,} tokens of {expected}; download or copy it again"
        )


def merges_to_tokenizer_json(path: Path, ids_path: Path) -> dict[str, Any]:
    """Return the tokenizer.json of a merges file and the ids in `ids_path`.

    Without `ids_path` the ids are in the order of the merges, and end-of-text has the
    id after them. Words are split by GPT-2's pattern. Tokens that no merge makes are
    special.

    Raises:
      UserError: the tokenizer has another pattern, or words that were added.
    """
    directory = path.parent
    class_name = read_beside(directory, SETTINGS).get("tokenizer_class")
    if class_name is None:  # transformers infers it from the model type.
        model_type = read_beside(directory, "config.json").get("model_type")
        class_name = CLASS_OF_MODEL_TYPE.get(str(model_type))
    # The two files hold no word pattern: transformers' class decides it.
    if isinstance(class_name, str) and not class_name.startswith(WITH_GPT2_PATTERN):
        raise UserError(
            f"{directory} has no tokenizer.json, and a {class_name[:100]} may split"
            f" words otherwise than GPT-2; {SAVE_AGAIN}"
        )
    merges: list[list[str]] = []
    # U+FFFD spells no byte, so a line that is not UTF-8 is named below.
    lines = read_bytes(path).decode(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        # No other line with a # is a comment: # is a token that merges with others.
        if line.startswith("#version") or not line:
            continue
        if pair_of(line) is None:
            raise UserError(f"{path}, line {number}: expected two tokens to merge")
        merges.append(line.split())
    ordinary = [*SPELLING.values(), *map("".join, merges)]
    # In GPT-2's ids end-of-text follows the tokens of the merges.
    tokens = dict.fromkeys([*ordinary, ENDOFTEXT])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # A model's ids may be in another order than the merges.
    if has_file(ids_path):
        vocabulary = read_json(ids_path)
        check_merged(path, ids_path, vocabulary.keys() - set(ordinary))
    special = {token: vocabulary[token] for token in vocabulary.keys() - set(ordinary)}
    # The two files do not record how transformers finds an added word in a text.
    check_no_tokens_added(
        directory, ids_path.name, {ENDOFTEXT: vocabulary.get(ENDOFTEXT)}
    )
    # The regex of the library's ByteLevel is GPT-2's pattern.
    pre_tokenizer = BYTE_LEVEL | {"use_regex": True}
    return bpe_tokenizer_json(
        vocabulary, merges, special, pre_tokenizer, ignore_merges=False
    )


def check_merged(path: Path, ids_path: Path, unmerged: Set[str]) -> None:
    """Raise UserError for tokens of text that no merge makes: the file of merges may
    have been cut. Special tokens spell no spaces and no parts of characters.
    """
    for token in sorted(unmerged):
        if unspell(token) not in (None, token.encode()):
            raise UserError(
                f"{ids_path} has {token!r}, which no merge of {path.name} makes;"
                " download or copy both again"
            )


def bpe_tokenizer_json(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    special: dict[str, int],
    pre_tokenizer: dict[str, Any],
    *,
    ignore_merges: bool,
) -> dict[str, Any]:
    """Return the tokenizer.json of a byte-level encoding with this pre-tokenizer."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, i in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": merges,
        },
    }


def pair_of(merge: Any) -> Pair | None:
    """Return the two tokens of a merge; None if `merge` has another form.

    A tokenizer.json has a list of two spellings, or a text with a space between them.
    """
    spellings = merge.split() if isinstance(merge, str) else merge
    tokens = [token for token in map(unspell, spellings) if token is not None]
    if len(tokens) == len(spellings) == 2:
        return (tokens[0], tokens[1])
    return None


def merges_follow_ids(
    ids: TokenIds, merges: Sequence[Pair], *, ignore_merges: bool = False
) -> bool:
    """Return whether tiktoken encodes as these merges do.

    tiktoken gets no merges: it merges the adjacent pair whose joint token has the
    lowest id.

    Args:
      ids: the ids of all bytes and tokens.
      merges: the merges in the order of their priorities.
      ignore_merges: whether a word that is a token gets its id without merges. Then a
          token may have no merge.
    """
    merged_ids = [ids.get(left + right, -1) for left, right in merges]
    # tiktoken panics at a byte without an id. The library may have an unknown token.
    if not all(bytes([byte]) in ids for byte in range(256)):
        return False
    if max(map(len, ids)) > MAX_TOKEN_BYTES:
        return False
    if ignore_merges:
        # Here a token may have several merges, or none. Only its merge in `merges_of`
        # is ever applied, so others may be ignored if priorities follow the ids.
        return merged_ids == sorted(merged_ids) and set(merges_of(ids)) <= set(merges)
    # With more ids than merges, some token has no merge. A word that is this token gets
    # its id from tiktoken, and not from the library without `ignore_merges`.
    return len(ids) == 256 + len(merges) and merges_of(ids) == list(merges)


def merges_of(ranks: TokenIds) -> list[Pair]:
    """Return the merges of a byte-pair encoding, in order.

    Run BPE on each token with only lower ranks: the last merge is the token's merge. If
    more than two parts remain, no merge makes the token: it is only matched as a whole
    word.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = last_parts(token, rank, ranks)
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def last_parts(token: bytes, rank: int, ranks: TokenIds) -> list[bytes]:
    """Return the parts of a token after all merges of ranks below its own, at least two
    unless it is one byte.

    The pair of the lowest rank is merged first, of equal ones the leftmost. A queue
    holds them, because looking at all pairs before each merge takes a time that grows
    with the square of the length.
    """
    size = len(token)
    # Two arrays link the parts, so that a merge moves no others. ends[i] is the end of
    # the part that starts at byte i; 0: no part starts there.
    ends = list(range(1, size + 1))
    # previous[i] is the start of the part before the one that starts at byte i.
    previous = list(range(-1, size - 1))
    queue: list[tuple[int, int]] = []  # the rank and the start of a pair

    def pair_rank(start: int) -> int:
        """Return the rank of the part at `start` joined with the next part.

        The token's own rank, if there is no such pair.
        """
        middle = ends[start]
        if middle in (0, size):
            return rank
        return ranks.get(token[start : ends[middle]], rank)

    def push(start: int) -> None:
        if start >= 0 and (joined := pair_rank(start)) < rank:
            heapq.heappush(queue, (joined, start))

    for start in range(size):
        push(start)
    count = size
    while queue and count > 2:
        lowest, start = heapq.heappop(queue)
        # Entries stay in the queue when one of their two parts is merged.
        if pair_rank(start) != lowest:
            continue
        middle = ends[start]
        end = ends[middle]
        ends[start], ends[middle] = end, 0
        if end < size:
            previous[end] = start
        count -= 1
        push(previous[start])
        push(start)
    return [token[start:end] for start, end in enumerate(ends) if end]


def byte_level_ids(tree: dict[str, Any]) -> TokenIds | None:
    """Return the ids of the ordinary tokens of a byte-pair encoding by their bytes.

    None: its tokens are not spelled as GPT-2's, it changes a text before it encodes, or
    its model is another one.
    """
    model, added = tree["model"], added_ids(tree)
    # tiktoken has no normalizer, and one token for a text at any place of a word.
    if not is_bpe(model) or any(map(model.get, AFFIXES)) or tree.get("normalizer"):
        return None
    ids: TokenIds = {}
    for spelling, i in model["vocab"].items():
        # Added tokens are spelled as they stand in a text, not in GPT-2's spelling.
        if spelling in added:
            continue
        token = unspell(spelling)
        if token is None:
            return None
        ids[token] = i
    return ids


def is_same_in_tiktoken(tree: dict[str, Any], ids: TokenIds) -> bool:
    """Return whether tiktoken encodes as a tokenizer.json with a known word pattern.

    tiktoken knows no added words, which `tokenizers` matches before all others.

    Args:
      tree: the content of the tokenizer.json.
      ids: the result of `byte_level_ids`.
    """
    has_added_words = any(
        not token.get("special") and token["content"] != ENDOFTEXT
        for token in tree["added_tokens"]
    )
    pairs = [pair_of(merge) for merge in tree["model"]["merges"]]
    merges = [pair for pair in pairs if pair is not None]
    ignore_merges = bool(tree["model"].get("ignore_merges"))
    return (
        not has_added_words
        and len(merges) == len(pairs)
        and merges_follow_ids(ids, merges, ignore_merges=ignore_merges)
    )


def is_bpe(model: dict[str, Any]) -> bool:
    """Return whether the model of a tokenizer.json is byte-pair encoding.

    The library wrote no type of a model before version 0.9; GPT-2's file has none.
    """
    return "merges" in model and model.get("type", "BPE") == "BPE"


def added_ids(tree: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the added tokens of a tokenizer.json, special or not."""
    return {
        token["content"]: int(token["id"]) for token in tree.get("added_tokens") or ()
    }


def pattern_of(tree: dict[str, Any]) -> str | None:
    """Return tiktoken's spelling of a tokenizer.json's word pattern.

    "": no words are split. None: the pre-tokenizer does more than split by one of
    `KNOWN_PATTERNS`.
    """
    outer: Any = tree.get("pre_tokenizer") or {}
    *splits, byte_level = outer.get("pretokenizers") or [outer]
    # Without ByteLevel at the end, words are not spelled as bytes. tiktoken puts no
    # space before a text.
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return None
    by_gpt2_pattern = byte_level.get("use_regex", True)
    if not splits:
        return GPT2 if by_gpt2_pattern else ""
    # A second split would cut the words of the first, where tiktoken has one pattern.
    if by_gpt2_pattern or len(splits) > 1 or not keeps_words(splits[0]):
        return None
    return BY_HF_PATTERN.get(splits[0]["pattern"].get("Regex"))


def keeps_words(part: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer is a Split into the matches of its pattern."""
    # Removed and inverted, a Split removes what is between the matches. The known
    # patterns match every character, so nothing is.
    behavior = part.get("behavior"), bool(part.get("invert"))
    is_kept = behavior in (("Isolated", False), ("Removed", True))
    return part.get("type") == "Split" and is_kept


def check_unique_ids(name: str | Path, ids: TokenIds) -> None:
    """Raise UserError for two tokens of one id."""
    tokens: dict[int, bytes] = {}
    for token, i in ids.items():
        other = tokens.setdefault(i, token)
        if other != token:
            raise UserError(
                f"{name}: the tokens {other.decode(errors='replace')!r} and"
                f" {token.decode(errors='replace')!r} have one id, {i}; download or"
                " copy it again"
            )


def make_encoding(
    path: Path,
    ranks: TokenIds,
    pattern: str,
    special_tokens: dict[str, int],
) -> tiktoken.Encoding:
    """Return tiktoken's encoding."""
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise UserError(
            f"{path} is not a byte-level encoding: {missing} of the 256 bytes have"
            " no id"
        )
    ordinary = set(ranks.values())
    # tiktoken accepts such a token, and a text with the ordinary one would then hold
    # the special one's id, which may end a document.
    for token, i in special_tokens.items():
        if i in ordinary:
            raise UserError(
                f"{path}: the special token {token!r} has the id {i} of an ordinary"
                " token; give it another"
            )
    # tiktoken panics at two tokens of one id: Rust prints to stderr, and what is raised
    # is no Exception.
    check_unique_ids(path, ranks)
    check_pattern_speed(path, pattern)
    try:
        return tiktoken.Encoding(
            str(path),
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens=special_tokens,
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
