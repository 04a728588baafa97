"""GPT-2 as a `Family`."""

from trainer.errors import UserError
from trainer.models.family import Family, HuggingFace, Sizes
from trainer.models.gpt2.huggingface import load_gpt2, save_gpt2
from trainer.models.gpt2.model import build_functions
from trainer.models.gpt2.spec import GPT2Spec


def check_tensor(spec: GPT2Spec, devices: int, multiple: int) -> None:
    """Raise UserError where heads or channels cannot be split over the devices."""
    widths = spec.d_model, spec.mlp_width
    # A device needs whole heads, and FP8 matmuls a multiple of channels on each.
    if spec.n_head % devices or any(width % (devices * multiple) for width in widths):
        parts = f"multiples of {multiple}" if multiple > 1 else "equal parts"
        raise UserError(
            f"parallel.tensor={devices} does not divide model.n_head={spec.n_head}"
            f" heads, width {spec.d_model} and {spec.mlp_width} hidden channels into"
            f" {parts}; valid: a divisor of all"
        )
    # `LastColumns` counts the columns of a whole kernel.
    if spec.value_gain is not None:
        raise UserError(
            f"model.value_gain={spec.value_gain} needs parallel.tensor=1, not"
            f" {devices}; or set it to null"
        )


def matmul_sizes(spec: GPT2Spec, sizes: Sizes) -> Sizes:
    """Return sizes with `attn.c_value` beside `attn.c_attn`; see `value_gain`."""
    if spec.value_gain is None:
        return sizes
    d = spec.d_model
    # A list, since `sizes` grows within the loop.
    for path in [path for path in sizes if path.endswith("attn.c_attn")]:
        sizes |= {path: (d, 2 * d), path.replace("c_attn", "c_value"): (d, d)}
    return sizes


FAMILY = Family(
    name="gpt2",
    forward_order=(
        "wte", "wpe", "h", "ln_f", "ln_1", "attn", "ln_2", "mlp",
        "c_attn", "c_value", "c_gate", "c_fc", "c_proj", "embedding", "scale",
        "kernel", "bias",
    ),
    build=build_functions,
    check_tensor=check_tensor,
    huggingface=HuggingFace(load_gpt2, save_gpt2),
    matmul_sizes=matmul_sizes,
)  # fmt: skip
