"""Models that people really use, written without any knowledge of scales: gradients are
measured on them.

Each builder takes `depth` and `width`, and `dot_general` where the model lets its
matrix products be replaced.
"""

import inspect
from collections.abc import Callable
from functools import partial

from zoo import flax_models, llama, programs, sequences
from zoo.case import Case

BUILDERS: dict[str, Callable[..., Case]] = {
    "llama": llama.llama,
    "llama_fan_in": partial(llama.llama, std=None),
    "llama_scan": partial(llama.llama, depth=16, std=None, is_deep=True, scan=True),
    "llama_scan_remat": partial(llama.llama, depth=16, scan=True, remat=True),
    "encoder_pre_ln": flax_models.encoder,
    "encoder_post_ln": partial(flax_models.encoder, pre=False),
    "vit": flax_models.vit,
    "resnet": flax_models.resnet,
    "moe": sequences.moe,
    "mamba": sequences.mamba,
    "contrastive": programs.contrastive,
    "ctc": programs.ctc,
    "ode_rk4": programs.ode_rk4,
    "flash_scan": programs.flash,
    "post_norm": programs.post_norm,
    "cross_entropy_1m": programs.million_tokens,
    "stochastic_chain": programs.stochastic_chain,
}


def takes_fp8(name: str) -> bool:
    """Return whether the model's matrix products can be replaced."""
    return "dot_general" in inspect.signature(BUILDERS[name]).parameters
