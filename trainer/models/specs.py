"""The families that a configuration can name, by the class of their specs. Importing it does not import JAX."""

from typing import Any

from trainer.models.spec import GPT2Spec

FIRST = "gpt2"  # the family of what was saved before there were others, and does not say its own
SPECS: dict[str, Any] = {"gpt2": GPT2Spec}
