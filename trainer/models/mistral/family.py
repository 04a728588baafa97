"""Mistral as a `Family`."""

from trainer.models.llama.family import make_family
from trainer.models.mistral.spec import MistralSpec

FAMILY = make_family(MistralSpec)
