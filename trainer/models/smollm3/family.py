"""SmolLM3 as a `Family`."""

from trainer.models.llama.family import make_family
from trainer.models.smollm3.spec import SmolLM3Spec

FAMILY = make_family(SmolLM3Spec)
