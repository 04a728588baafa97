"""Qwen3 as a `Family`."""

from trainer.models.llama.family import make_family
from trainer.models.qwen3.spec import Qwen3Spec

FAMILY = make_family(Qwen3Spec)
