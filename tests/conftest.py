"""Eight CPU devices, no implicit rank promotion: what the tests run is what a sharded, strict user program runs."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
