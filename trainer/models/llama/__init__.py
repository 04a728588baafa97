"""Llama: sizes and choices, the model, and Hugging Face's files.

`spec` needs no JAX; `family.FAMILY` is what `trainer.models.registry` finds.
"""
