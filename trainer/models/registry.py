"""The families of models: their specs, without importing JAX, and the family of a spec.

A family `name` is the package `trainer.models.name`: the spec is in `spec`, and
`family.FAMILY` is what the other rooms use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama.spec import LlamaSpec
from trainer.models.mistral.spec import MistralSpec
from trainer.models.olmo2.spec import Olmo2Spec
from trainer.models.qwen2.spec import Qwen2Spec
from trainer.models.qwen3.spec import Qwen3Spec
from trainer.models.smollm3.spec import SmolLM3Spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.models.family import Family, Spec

# A spec stands after the one that it inherits from: `family_of` searches backwards.
SPECS: dict[str, type[Spec]] = {
    "gpt2": GPT2Spec,
    "llama": LlamaSpec,
    "mistral": MistralSpec,
    "qwen2": Qwen2Spec,
    "qwen3": Qwen3Spec,
    "smollm3": SmolLM3Spec,
    "olmo2": Olmo2Spec,
}


def family_name_of(config: Mapping[str, Any]) -> str:
    """Return the name of the family of a Hugging Face config.json.

    Raises:
      UserError: the family is not in `SPECS`.
    """
    # The first GPT-2 files had no model_type.
    name = config.get("model_type", "gpt2" if "n_layer" in config else None)
    if not isinstance(name, str) or name not in SPECS:
        raise UserError(
            f"model_type={name!r} is not supported; valid: {', '.join(SPECS)}"
        )
    return name


def family_of(spec: Spec | type[Spec]) -> Family:
    """Return the family of a spec, or of a class of specs.

    Importing the family here lets configurations be read without JAX.
    """
    cls = spec if isinstance(spec, type) else type(spec)
    for name, spec_class in reversed(SPECS.items()):
        if issubclass(cls, spec_class):
            return importlib.import_module(f"trainer.models.{name}.family").FAMILY
    # No class of SPECS: the spec of a custom model. The import brings JAX, so it is
    # here.
    from trainer.models.custom import CUSTOM

    return CUSTOM
