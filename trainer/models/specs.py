"""The families that a configuration can name, by the class of their specs. Importing it
does not import JAX.
"""

from typing import TYPE_CHECKING

from trainer.models.llama_spec import LlamaSpec
from trainer.models.spec import GPT2Spec

if TYPE_CHECKING:
    from trainer.models.family import Spec

# the family of what was saved before there were others, and does not say its own
FIRST = "gpt2"
SPECS: dict[str, "type[Spec]"] = {"gpt2": GPT2Spec, "llama": LlamaSpec}
