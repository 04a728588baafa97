"""Models that people really use, written without any knowledge of scales: gradients are
measured on them.

Each builder takes `depth` and `width`, and `dot_general` where the model lets its
matrix products be replaced.
"""

import inspect
from collections.abc import Callable

from zoo import flax_models, images, llama, programs, sequences
from zoo.case import Case

BUILDERS: dict[str, Callable[..., Case]] = {
    builder.__name__: builder
    for builder in (
        llama.llama,
        llama.llama_fan_in,
        llama.llama_scan,
        llama.llama_remat,
        llama.llama_scan_remat,
        flax_models.encoder_pre_ln,
        flax_models.encoder_post_ln,
        flax_models.nnx_decoder,
        flax_models.vit,
        flax_models.resnet,
        images.unet,
        images.diffusion,
        sequences.moe,
        sequences.mamba,
        sequences.rwkv,
        sequences.lstm,
        programs.contrastive,
        programs.ctc,
        programs.ode_rk4,
        programs.ode_adaptive,
        programs.flash_scan,
        programs.flash_fori,
        programs.residual,
        programs.residual_24,
        programs.post_norm,
        programs.cross_entropy_64k,
        programs.cross_entropy_1m,
        programs.cross_entropy_4m,
        programs.stochastic_chain,
    )
}


def takes_fp8(name: str) -> bool:
    """Whether the model's matrix products can be replaced."""
    return "dot_general" in inspect.signature(BUILDERS[name]).parameters
