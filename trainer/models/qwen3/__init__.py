"""Qwen3: Llama with norms of queries and keys, and heads of 128 channels.

The model and its files are `trainer.models.llama`; `spec` says where it differs.
"""
