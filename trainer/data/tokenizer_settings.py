"""Read the settings files in the directory of a vocabulary.

They name the token that ends a document, tokens that were added later, and settings
that transformers puts in the place of those in tokenizer.json.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiktoken_ext.openai_public import ENDOFTEXT

from trainer.errors import UserError
from trainer.files import has_file, read_file, read_object

# Largest size of a file that is read; the largest vocabularies take some 40 MB.
MAX_BYTES = 1 << 28
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
# The first has priority, as in transformers.
MODEL_CONFIGS = ("generation_config.json", "config.json")
# Keys of tokenizer_config.json. By each, transformers overwrites a field in a part of
# tokenizer.json.
REPLACED_SETTINGS = {
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
}
# Classes of transformers that take a tokenizer.json as it is.
UNCHANGED_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # of an added token
NUL = "\0"  # the token that ends a document where ids are bytes
# Common end tokens, for files that name none.
ENDS = (ENDOFTEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", NUL)

SAVE_AGAIN = (
    "save all in a tokenizer.json by transformers'"
    " AutoTokenizer.from_pretrained(...).save_pretrained(...)"
)


def end_token(directory: Path, special: Mapping[str, int]) -> str | None:
    """Return the token that ends a document, or None.

    It is the first of these that exists, as in transformers:
    - `eos_token` of tokenizer_config.json, then of special_tokens_map.json; in the
      other order if tokenizer_config.json has no `added_tokens_decoder`;
    - `eos_token_id` of generation_config.json, then of config.json;
    - the first of `ENDS` that is a special token.

    Args:
      directory: the directory of the tokenizer.
      special: the ids of its special tokens. An `eos_token_id` must be among them, an
          `eos_token` need not be.
    """
    settings, legacy = read_beside(directory, SETTINGS), read_beside(directory, SPECIAL)
    files = [settings, legacy]
    if "added_tokens_decoder" not in settings:
        files.reverse()
    for file in files:
        end = file.get("eos_token")
        # transformers writes a token with its flags as an object.
        if isinstance(end, dict):
            end = end.get("content")
        if isinstance(end, str):
            return end
    tokens = {i: token for token, i in special.items()}
    for name in MODEL_CONFIGS:
        ids = read_beside(directory, name).get("eos_token_id")
        # Llama 3's generation_config.json lists several.
        for i in ids if isinstance(ids, list) else [ids]:
            # `True in tokens` would be the id 1.
            if type(i) is int and i in tokens:
                return tokens[i]
    return next((token for token in ENDS if token in special), None)


def added_later(directory: Path) -> dict[str, int]:
    """Return the ids of tokens that transformers adds to a vocabulary."""
    listed = read_beside(directory, SETTINGS).get("added_tokens_decoder") or {}
    # Where both list a token, tokenizer_config.json counts: with an
    # `added_tokens_decoder` there, transformers does not read added_tokens.json.
    return read_beside(directory, ADDED) | {
        token["content"]: int(i) for i, token in listed.items()
    }


def check_no_tokens_added(directory: Path, file: str, ids: Mapping[str, Any]) -> None:
    """Raise UserError for a vocabulary to which transformers adds tokens.

    Args:
      directory: the directory of the tokenizer.
      file: name of the file that holds the vocabulary.
      ids: the ids of its tokens.

    Raises:
      UserError: an added token has no id, or another id, in the vocabulary.
    """
    for token, i in added_later(directory).items():
        if ids.get(token) != i:
            raise UserError(
                f"{directory}: {ADDED} or {SETTINGS} adds {token!r} with the id {i},"
                f" but {file} has no such token with this id; {SAVE_AGAIN}"
            )


def check_same_flags(
    directory: Path, file: str, added_tokens: Mapping[str, Any]
) -> None:
    """Check that transformers matches a vocabulary's added words by the same `FLAGS`.

    Special tokens are not checked, since no text is encoded to them.

    Args:
      directory: the directory of the tokenizer.
      file: name of the file that holds the vocabulary.
      added_tokens: its added tokens by their texts, as a tokenizer.json has them.

    Raises:
      UserError: only tokenizer_config.json lists a word, or lists it with other flags.
    """
    listed = read_beside(directory, SETTINGS).get("added_tokens_decoder") or {}
    for token in listed.values():
        text = token["content"]
        added_token = added_tokens.get(text)
        if added_token is None and not token.get("special"):
            raise UserError(
                f"{directory}: {SETTINGS} adds the word {text!r}, which is none of the"
                f" added_tokens of {file}; {SAVE_AGAIN}"
            )
        if added_token is None or added_token.get("special"):
            continue
        listed_flags, flags = flags_of(token), flags_of(added_token)
        for flag in FLAGS:
            if listed_flags[flag] != flags[flag]:
                raise UserError(
                    f"{directory}: {SETTINGS} has {flag}={listed_flags[flag]} for the"
                    f" added word {text!r}, and {file} {flag}={flags[flag]};"
                    f" {SAVE_AGAIN}"
                )


def flags_of(token: Mapping[str, Any]) -> dict[str, bool]:
    """Return the flags that say how a token is found, with transformers' defaults."""
    # transformers' AddedToken is normalized unless it is special.
    defaults = {"normalized": not token.get("special")}
    return {flag: bool(token.get(flag, defaults.get(flag))) for flag in FLAGS}


def check_settings_beside(directory: Path, file: str, tree: Mapping[str, Any]) -> None:
    """Check that the settings beside a tokenizer.json do not change it in transformers.

    Args:
      directory: the directory of the tokenizer.
      file: name of the file.
      tree: its content.

    Raises:
      UserError: a setting beside the file differs from it.
    """
    settings = read_beside(directory, SETTINGS)
    for key, (part, name) in REPLACED_SETTINGS.items():
        setting, value = settings.get(key), (tree.get(part) or {}).get(name)
        # A key that is missing, or null as `strip_accents` may be, leaves
        # tokenizer.json as it is.
        if isinstance(setting, bool) and isinstance(value, bool) and setting != value:
            raise UserError(
                f"{directory}: {SETTINGS} has {key}={setting}, and {file}"
                f" {name}={value} in its {part}; make them equal, or {SAVE_AGAIN}"
            )
    is_unchanged = settings.get("tokenizer_class") in UNCHANGED_CLASSES
    has_no_prefix = settings.get("add_prefix_space") is False
    if has_no_prefix and not is_unchanged and prepends_space(tree):
        raise UserError(
            f"{directory}: {SETTINGS} has add_prefix_space=False, but {file} puts a"
            f" space before a text; {SAVE_AGAIN}"
        )


def prepends_space(part: Any) -> bool:
    """Return whether a part of a tokenizer.json puts SentencePiece's space before a
    text.
    """
    if isinstance(part, list):
        return any(map(prepends_space, part))
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    if kind == "Metaspace":
        # The library's own default of `prepend_scheme` is "always".
        return part.get("prepend_scheme", "always") != "never"
    steps = ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers")
    return kind == "Prepend" or any(prepends_space(part.get(step)) for step in steps)


def read_beside(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    file = directory / name
    if has_file(file):
        return read_json(file)
    return {}


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file, or raise UserError."""
    with tokenizer_file_errors(path):
        return read_file(path, MAX_BYTES)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise UserError."""
    with tokenizer_file_errors(path):
        return read_object(path, MAX_BYTES)


@contextmanager
def tokenizer_file_errors(path: Path) -> Iterator[None]:
    """Turn the error of a file that cannot be read into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"tokenizer file {path}: {error.strerror}") from error
