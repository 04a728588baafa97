"""OLMo 2: Llama with norms after the branches, and of queries and keys.

The model and its files are `trainer.models.llama`; `spec` says where it differs.
"""
