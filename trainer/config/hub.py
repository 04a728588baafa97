"""Models and tokenizers by their id on the Hugging Face hub."""

import re
from pathlib import Path

from trainer.errors import UserError

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w.-]+(?:/[\w.-]+)*))?")
TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "encoder.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "config.json", "generation_config.json",
)  # fmt: skip
MODEL_FILES = ("model*.safetensors", "*.json", "*.jinja", *TOKENIZER_FILES)
# Keys that take an id, each with the patterns of the files to fetch.
KEYS = {"init_from": MODEL_FILES, "data.tokenizer": TOKENIZER_FILES}


def fetch(key: str, value: str) -> str:
    """Return the directory of a hub id's files, fetched if the cache lacks them.

    An id is `OWNER/NAME` or `OWNER/NAME@REVISION`. A value that exists as a path, or
    whose parent directory exists, is returned unchanged.

    Args:
      key: the key of the configuration, one of `KEYS`.
      value: its value.

    Raises:
      UserError: the hub has no such repository, or cannot be reached.
    """
    match = HUB_ID.fullmatch(value)
    # A mistyped local path looks like OWNER/NAME: with its parent here, the hub is not
    # asked.
    if match is None or Path(value).exists() or Path(value).parent.exists():
        return value
    # Imported where it is used: most runs need no hub.
    import huggingface_hub
    from huggingface_hub import errors

    name, revision = match.groups()
    try:
        # No pickled weights and no other formats, which no reader takes.
        return huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(KEYS[key])
        )
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{key}={value}: the hub's {name} has no revision {revision}"
        ) from None
    except errors.GatedRepoError:
        raise UserError(
            f"{key}={value}: the hub asks you to accept the model's terms; accept them"
            f" on its page and log in by `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{key}={value} is not a path here, and the hub has no such repository (or"
            " you may not read it); valid: a path, or OWNER/NAME of the hub"
        ) from None
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        raise UserError(
            f"{key}={value} is not a path here, and the hub cannot be reached"
            f" ({type(error).__name__}); fetch it where there is a network, by"
            f" `hf download {name}`, and give the directory"
        ) from error
