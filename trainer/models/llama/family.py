"""Llama as a `Family`."""

from pathlib import Path

from trainer.errors import UserError
from trainer.models.family import Family, HuggingFace
from trainer.models.llama.huggingface import load_llama, save_llama
from trainer.models.llama.model import build_functions
from trainer.models.llama.spec import LlamaSpec
from trainer.models.model_functions import Params


def check_tensor(spec: LlamaSpec, devices: int, multiple: int) -> None:
    """Raise UserError where heads or channels cannot be split over the devices."""
    q_width = spec.n_head * spec.head_width
    kv_width = spec.n_kv_head * spec.head_width
    # The number of heads of keys and values divides that of queries: where devices have
    # whole heads of keys, they have whole heads of queries.
    if spec.n_kv_head % devices or any(
        width % (devices * multiple) for width in (q_width, kv_width, spec.mlp_width)
    ):
        parts = f"multiples of {multiple}" if multiple > 1 else "equal parts"
        raise UserError(
            f"parallel.tensor={devices} must divide model.n_kv_head={spec.n_kv_head}"
            f" and split {kv_width} channels of keys, {q_width} of queries and"
            f" {spec.mlp_width} of the MLP into {parts}; valid: a divisor of all"
        )


def make_family(cls: type[LlamaSpec]) -> Family:
    """Return the family of a spec that is Llama's, or inherits from it."""

    def load(source: Path, spec: LlamaSpec | None) -> tuple[LlamaSpec, Params]:
        # The given spec is not used: a Llama needs its config.json.
        return load_llama(source, cls)

    return Family(
        name=cls.config_format.model_type,
        forward_order=(
            "wte", "h", "norm", "lm_head", "attn_norm", "attn", "mlp_norm", "mlp",
            "q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "o_proj", "gate_proj",
            "up_proj", "down_proj", "embedding", "scale", "kernel", "bias",
        ),
        build=build_functions,
        check_tensor=check_tensor,
        huggingface=HuggingFace(load, save_llama),
    )  # fmt: skip


FAMILY = make_family(LlamaSpec)
