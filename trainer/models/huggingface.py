"""Weights in Hugging Face's directories, of any family: which one, a config.json's
`model_type` says.
"""

from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import well_formed
from trainer.models.family import Family, Spec
from trainer.models.functional import Params
from trainer.models.specs import FIRST, SPECS
from trainer.models.weight_files import config_beside, read_object


def directory_of(source: Path) -> Path:
    """The directory of weights, which may be given as a file."""
    return source if source.is_dir() else source.parent


def family_at(source: Path) -> Family | None:
    """The family of the weights in a directory, or of a file in it; None where no
    config.json tells.

    Raises:
      UserError: a config.json that is damaged, or of no family that is here.
    """
    file = config_beside(source)
    if not file.is_file():
        return None
    name = read_object(file).get("model_type", FIRST)
    if name not in SPECS:
        raise UserError(
            f"{file}: model_type={name!r} is not supported; valid: {', '.join(SPECS)}"
        )
    return SPECS[name].family()


def load(source: Path, spec: Spec) -> tuple[Any, Params]:
    """Spec and parameters (NumPy, the file's dtype, unrolled layers) of a directory or
    a safetensors file.

    Args:
      source: where they are.
      spec: of the model that is to take them, which tells what a file without a
          config.json does not.

    Raises:
      UserError: not such files, damaged, or of no family that is here.
    """
    with well_formed(f"the model in {source}", "download or copy it again"):
        family = family_at(source)
        if family is None:
            return spec.family().huggingface.load(source, spec)
        return family.huggingface.load(source, None)


def save(
    directory: str | Path, spec: Spec, params: Params, eot: int | None = None
) -> list[Path]:
    """Write parameters, unrolled or stacked, and a config.json; the paths of the
    weights.

    Args:
      directory: made if absent.
      spec: the model's.
      params: its parameters; written in their own dtype.
      eot: the tokenizer's end-of-text id; None: not told.

    Raises:
      UserError: a choice that Hugging Face's models of the family do not have, or
          weights already there.
    """
    family = spec.family()
    unrolled = family.unstack_layers(params) if spec.scan_layers else params
    return family.huggingface.save(Path(directory), spec, unrolled, eot)
