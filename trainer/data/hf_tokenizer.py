"""Hugging Face's tokenizer files: written beside an export, compared with weights'.

A tokenizer.json holds everything: the vocabulary with bytes in GPT-2's printable
spelling, the merges, the word pattern, special tokens, and the decoder.
"""

import json
from pathlib import Path
from typing import Any

from trainer.data.bpe_files import (
    MERGES_AND_IDS_FILES,
    TokenIds,
    bpe_tokenizer_json,
    merges_of,
)
from trainer.data.byte_spelling import BYTE_LEVEL, spell
from trainer.data.json_tokenizer import (
    TOKENIZER_JSON,
    JSONTokenizer,
    ids_of,
    spelled_ids,
)
from trainer.data.tokenizer import Tokenizer, end_of, get_tokenizer
from trainer.data.tokenizer_settings import (
    MODEL_CONFIGS,
    SETTINGS,
    added_later,
    read_beside,
    read_json,
)
from trainer.data.word_patterns import KNOWN_PATTERNS, to_hf_pattern
from trainer.errors import UserError
from trainer.files import has_file, well_formed, write_atomically

# Texts that tokenizers of one vocabulary may split differently: letter case, digits,
# spaces, signs, composed characters and other scripts.
PROBES = (
    *("Hello", "HELLO", "DON'T", "don't", " a", "a  b", "  a", "a ", "\tb", "\n\n\na"),
    *("a\r\nb", "1234567", "3.14", "a1", "!=", "a_b", "x)\n", "...", "//a", "'ll"),
    *("\u00e9", "e\u0301", "\ufb01", "\uff21", "\u201ca\u201d", "\u65e5\u672c\u8a9e"),
    *("\ud55c\uad6d", "\u041f\u0440", "\u0645\u0631", "\U0001f642"),
)
PROBED_TOKENS = 500  # tokens, evenly spaced by rank, that are encoded as texts


def save_hf(directory: Path, tokenizer: Tokenizer, context: int | None) -> list[Path]:
    """Write the files from which transformers reads the tokenizer.

    transformers encodes differently from ours in two ways. A text that spells the
    end-of-text token becomes that token. And a tokenizer that puts a token before each
    text, as Llama's do, does so.

    Args:
      directory: an existing directory.
      tokenizer: the tokenizer of a run.
      context: tokens that the model takes; None: there is no model yet.

    Returns:
      the paths of the files.

    Raises:
      UserError: the tokenizer's word pattern is not known.
    """
    end = end_of(tokenizer)
    settings: dict[str, Any] = {
        # Beside a Qwen2, AutoTokenizer of transformers 5 builds other classes anew,
        # with Qwen2's word pattern. This class takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        # The clean-up removes spaces before punctuation from decoded texts.
        "clean_up_tokenization_spaces": False,
    }
    if context is not None:
        settings["model_max_length"] = context
    if isinstance(tokenizer, JSONTokenizer):
        files = {TOKENIZER_JSON: tokenizer.tree, SETTINGS: settings}
    else:
        check_known_pattern(tokenizer)
        files = {
            TOKENIZER_JSON: to_tokenizer_json(tokenizer),
            # As GPT-2's. lm-evaluation-harness puts it in the place of an empty
            # context.
            SETTINGS: settings | {"bos_token": end},
        }
    for name, tree in files.items():
        write_atomically(
            directory / name, json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
        )
    return [directory / name for name in files]


def check_known_pattern(tokenizer: Tokenizer) -> None:
    """Raise UserError for a word pattern of tiktoken that is not known.

    Hugging Face's library has another regex engine, so it may split words otherwise.
    """
    pattern = tokenizer.pattern
    if pattern is not None and pattern not in KNOWN_PATTERNS:
        raise UserError(
            f"tokenizer {tokenizer.name}: Hugging Face's `tokenizers` may read its word"
            f" pattern {pattern[:80]!r} otherwise, so that a {TOKENIZER_JSON} would"
            " give other ids, and none was written; the weights need a tokenizer of"
            " tiktoken, or train with a tokenizer whose pattern is that of GPT-2,"
            " GPT-4, GPT-4o, Llama 3, Qwen2 or Mistral"
        )


def to_tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of a tokenizer.json."""
    special = set(tokenizer.special_tokens.values())
    tokens = {token: i for token, i in tokenizer.tokens.items() if i not in special}
    # Hugging Face's library gives a special token that is not in the vocabulary the
    # next free id, whatever id stands in `added_tokens`.
    vocabulary = {
        spell(token): i for token, i in tokens.items()
    } | tokenizer.special_tokens
    splits = [] if tokenizer.pattern is None else [split_by(tokenizer.pattern)]
    merges = [[spell(left), spell(right)] for left, right in merges_of(tokens)]
    return bpe_tokenizer_json(
        vocabulary,
        merges,
        tokenizer.special_tokens,
        {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]},
        # Like tiktoken, give a word that is a token its id without merges.
        ignore_merges=True,
    )


def split_by(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer that splits a text into the words of a pattern."""
    regex = {"Regex": to_hf_pattern(pattern)}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def token_ids_in(directory: Path) -> TokenIds | None:
    """Return the ids of the tokenizer in a Hugging Face directory, or None.

    Raises:
      UserError: a file that is not JSON.
    """
    with well_formed(f"the tokenizer in {directory}", "download or copy it again"):
        if has_file(directory / TOKENIZER_JSON):
            ids = ids_of(read_json(directory / TOKENIZER_JSON))
            if ids is not None:
                return ids
        for _, name in MERGES_AND_IDS_FILES:
            if has_file(directory / name):
                return spelled_ids(read_json(directory / name) | added_later(directory))
    return None


def tokenizer_in(directory: Path) -> Tokenizer | None:
    """Return the tokenizer in a Hugging Face directory; None: it cannot be read."""
    try:
        # A relative path such as `gpt2` may be the name of an encoding.
        return get_tokenizer(str(directory.absolute()))
    except UserError:
        return None


def encoding_difference(theirs: Tokenizer, ours: Tokenizer) -> str | None:
    """Describe a text to which tokenizers of one vocabulary give different ids.

    None: the tokenizers are the same, or no difference was found in `PROBES` and in
    texts of single tokens of either.
    """
    if theirs.fingerprint == ours.fingerprint:
        return None

    def encode(tokenizer: Tokenizer, text: str) -> list[int] | None:
        try:
            return tokenizer.encode(text)
        except UserError:  # a character without a token
            return None

    # An added word of theirs may have none of our ids.
    more = [token for token in theirs.tokens if token not in ours.tokens]
    texts = [*PROBES]
    for tokens in (list(ours.tokens), more):
        probed = tokens[:: max(1, len(tokens) // PROBED_TOKENS)]
        # A token may be a part of a character.
        texts += [token.decode(errors="ignore") for token in probed]
    for text in texts:
        their_ids, our_ids = encode(theirs, text), encode(ours, text)
        if their_ids != our_ids:
            return (
                f"{text!r} is {their_ids or 'nothing'} there, {our_ids or 'nothing'}"
                " here"
            )
    return None


def end_difference(directory: Path, tokenizer: Tokenizer) -> str | None:
    """Describe how the files of a Hugging Face directory end a document otherwise.

    None: all of them that name an end have that of the tokenizer.
    """
    other_ends: list[str] = []
    saved = tokenizer_in(directory)
    if saved is not None and saved.eot != tokenizer.eot:
        other_ends.append(f"{describe_end(saved)} in the tokenizer beside them")
    for name in MODEL_CONFIGS:
        ids = read_beside(directory, name).get("eos_token_id")
        if ids is not None and tokenizer.eot not in (
            ids if isinstance(ids, list) else [ids]
        ):
            other_ends.append(f"eos_token_id={ids} in {name}")
    if not other_ends:
        return None
    others = ", and ".join(other_ends)
    return f"documents end with {describe_end(tokenizer)}, but {others}"


def describe_end(tokenizer: Tokenizer) -> str:
    """Return the token that ends a document, and its id, for messages."""
    return f"{end_of(tokenizer)!r} (id {tokenizer.eot})"


def token_difference(theirs: TokenIds, ours: Tokenizer) -> str | None:
    """Describe the lowest id whose tokens differ in `theirs` and `ours`, or None."""
    our_tokens = {i: token for token, i in ours.tokens.items()}
    # Of the special tokens only the end is in data, so only its row must be the same.
    our_tokens[ours.eot] = end_of(ours).encode()
    their_tokens = {i: token for token, i in theirs.items()}
    for i in sorted(our_tokens):
        token = our_tokens[i]
        if token != their_tokens.get(i):
            theirs_shown = "nothing"
            if i in their_tokens:
                theirs_shown = repr(their_tokens[i].decode(errors="replace"))
            return (
                f"id {i} is {theirs_shown} there,"
                f" {token.decode(errors='replace')!r} here"
            )
    return None
