"""Qwen2 as a `Family`."""

from trainer.models.llama.family import make_family
from trainer.models.qwen2.spec import Qwen2Spec

FAMILY = make_family(Qwen2Spec)
