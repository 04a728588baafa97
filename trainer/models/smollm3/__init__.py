"""SmolLM3: Llama with layers that have no rotary positions.

The model and its files are `trainer.models.llama`; `spec` says where it differs.
"""
