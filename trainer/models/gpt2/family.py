"""GPT-2 as a `Family`."""

from trainer.errors import UserError
from trainer.models.family import Family, HuggingFace
from trainer.models.gpt2.huggingface import load_gpt2, save_gpt2
from trainer.models.gpt2.model import build_functions
from trainer.models.gpt2.spec import GPT2Spec, forward_flops_per_token, linear_sizes


def check_tensor(spec: GPT2Spec, devices: int, multiple: int) -> None:
    """Raise UserError where heads or channels cannot be split over the devices."""
    widths = spec.d_model, spec.mlp_width
    if spec.n_head % devices or any(width % (devices * multiple) for width in widths):
        parts = f"multiples of {multiple}" if multiple > 1 else "equal parts"
        raise UserError(
            f"parallel.tensor={devices} does not divide model.n_head={spec.n_head}"
            f" heads, width {spec.d_model} and {spec.mlp_width} hidden channels into"
            f" {parts}; valid: a divisor of all"
        )
    if spec.value_gain is not None:
        raise UserError(
            f"model.value_gain={spec.value_gain} needs parallel.tensor=1, not"
            f" {devices}; or set it to null"
        )


FAMILY = Family(
    name="gpt2",
    blocks_name="h",
    parts=(
        "wte", "wpe", "h", "ln_f", "ln_1", "attn", "ln_2", "mlp",
        "c_attn", "c_value", "c_gate", "c_fc", "c_proj", "embedding", "scale",
        "kernel", "bias",
    ),
    build=build_functions,
    linear_sizes=linear_sizes,
    forward_flops_per_token=forward_flops_per_token,
    check_tensor=check_tensor,
    huggingface=HuggingFace(load_gpt2, save_gpt2),
)  # fmt: skip
