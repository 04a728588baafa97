"""The families that a configuration can name, without importing JAX."""

from typing import TYPE_CHECKING

from trainer.models.llama_spec import LlamaSpec
from trainer.models.spec import GPT2Spec

if TYPE_CHECKING:
    from trainer.models.family import Spec

# the family of saved runs and config.json files that name none
FIRST = "gpt2"
SPECS: dict[str, "type[Spec]"] = {"gpt2": GPT2Spec, "llama": LlamaSpec}
