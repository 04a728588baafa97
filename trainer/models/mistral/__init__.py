"""Mistral: Llama with a sliding window of attention.

The model and its files are `trainer.models.llama`; `spec` says where it differs.
"""
