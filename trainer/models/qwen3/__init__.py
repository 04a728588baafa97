"""Qwen3: Llama with norms of queries and keys, and heads of a width of their own.

The model and its files are `trainer.models.llama`; `spec` says where it differs.
"""
