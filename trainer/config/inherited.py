"""The architecture of `init_from`, for `model=from_init`, read without JAX, before
anything is built.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import (
    check_no_links,
    parse_json,
    read_file,
    read_mapping,
    well_formed,
)
from trainer.models.other_formats import check_format
from trainer.models.registry import SPECS, family_name_of
from trainer.models.weight_files import check_sizes, config_beside
from trainer.text import nearest

FROM_INIT = "from_init"
# Reading unexpected values raises these.
READ_ERRORS = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


def needs_architecture(model: Any) -> bool:
    """Return whether a composed `model` is `from_init` and still lacks sizes."""
    if not isinstance(model, dict) or model.get("name") != FROM_INIT:
        return False
    family = model.get("family")
    if family not in SPECS:
        return family is None
    spec = SPECS[family]
    may_be_null = {
        field.name for field in dataclasses.fields(spec) if field.default is None
    } | {"vocab_size"}
    needed = [key for key in spec.checkpoint_fields() if key not in may_be_null]
    # A resumed run has its sizes saved; the weights of init_from may be gone by then.
    return any(model.get(key) is None for key in needed)


def inherit(
    model: Mapping[str, Any], init_from: str | None, *, other_tokenizer: bool = False
) -> dict[str, Any]:
    """Return the keys of `model`, with the architecture of the weights.

    Args:
      model: keys of the composed configuration; those that are not null must be equal
        to those of the weights.
      init_from: the configuration's `init_from`.
      other_tokenizer: whether the vocabulary is the data's, not the weights'.

    Raises:
      UserError: `init_from` is null or has no architecture, or keys are not equal.
    """
    if init_from is None:
        raise UserError(
            "model=from_init takes the architecture of init_from, which is null; add"
            " init_from=RUN"
        )
    source = Path(init_from)
    if (source / "config.yaml").is_file():
        architecture = architecture_of_run(source)
    else:
        architecture = architecture_of_weights(source)
    # init.embeddings makes rows for the data's ids, so their number is not the
    # weights'.
    if other_tokenizer:
        architecture.pop("vocab_size", None)
    if model.get("context") is not None:  # a limit, which another run may set lower
        architecture.pop("context", None)
    conflicts = []
    # Refused, because weights of other sizes could not be loaded, and a silent change
    # would hide a typing error.
    for key, value in architecture.items():
        if model.get(key) not in (None, value):
            conflicts.append(f"model.{key}={model[key]} ({value} in init_from)")
    if conflicts:
        raise UserError(
            f"model=from_init, but init_from={init_from} is another model:"
            f" {', '.join(conflicts)}; leave these out"
        )
    return with_family_defaults(architecture["family"], {**model, **architecture})


def with_family_defaults(family: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `model`, with the family's defaults for those that are null.

    Raises UserError for an unknown family.
    """
    if family not in SPECS:
        raise UserError(
            f"model=from_init: init_from is a {family}, which is not known;"
            f" {nearest(family, list(SPECS))}"
        )
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(SPECS[family]):
        has_default = field.default is not dataclasses.MISSING
        keys[field.name] = field.default if has_default else None
    return keys | {key: value for key, value in model.items() if value is not None}


def architecture_of_run(run_dir: Path) -> dict[str, Any]:
    """Return the family and the architecture keys of a run."""
    # Somebody else may have made the run, with a link to a private file.
    check_no_links(run_dir)
    file = run_dir / "config.yaml"
    try:
        model = read_mapping(file)["model"]
        family = model["family"]
        # An unknown family is named by `with_family_defaults`, which lists the known
        # ones.
        keys = SPECS[family].checkpoint_fields() if family in SPECS else ()
        return {"family": family} | {key: model[key] for key in keys}
    except READ_ERRORS as error:
        raise UserError(
            f"{file} is damaged: it does not name the model; choose the model by name"
        ) from error


def architecture_of_weights(source: Path) -> dict[str, Any]:
    """Return the family and the architecture keys of a Hugging Face directory.

    `source`: the directory, or a safetensors file in it.
    """
    file = config_beside(source)
    if source.exists():
        # GGUF and other formats get a message of their own, before config.json is
        # missed.
        check_format(source)
    if not file.is_file():
        raise UserError(
            f"model=from_init: init_from={source} has neither a config.yaml (a run) nor"
            " a config.json (Hugging Face); give such a directory, or choose the model"
            " by name"
        )
    try:
        config = parse_json(read_file(file))
        name = family_name_of(config)
        architecture = SPECS[name].fields_from_huggingface(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except READ_ERRORS as error:
        raise UserError(
            f"{file} does not contain the sizes of a model ({error}); choose the model"
            " by name"
        ) from error
    with well_formed(file, "choose the model by name"):
        # A small config.json could claim widths that take all memory to build.
        check_sizes(source, architecture)
    return architecture | {"family": name}
