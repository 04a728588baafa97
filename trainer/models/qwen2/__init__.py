"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values.

The model and its files are `trainer.models.llama`; `spec` says where it differs.
"""
