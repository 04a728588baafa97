"""A small reader of FP8 exports: it casts inputs as config.json says, and multiplies.

All weights and scales are those of the file. The forward pass around the products is
the trainer's, which has no FP8.
"""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import deserialize

from scalify_core import asarray, fp8_dot_general
from scalify_core.array.scaled_array import as_scaled_array, is_scaled_array
from scalify_core.interpreter import value as v
from scalify_core.numerics.formats import saturating_cast
from scalify_core.static import composite, composite_rule
from trainer.models import huggingface
from trainer.models.named_weights import named_leaves
from trainer.precision.dots import narrow_gradient_dot

DTYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F16": np.float16,
    "F32": np.float32,
}  # fmt: skip


def settings_and_tensors(folder):
    """The quantization_config of an export, and its tensors by name."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: np.frombuffer(raw["data"], DTYPES[raw["dtype"]]).reshape(raw["shape"])
        for name, raw in deserialize((folder / "model.safetensors").read_bytes())
    }
    return config["quantization_config"], tensors


@composite(name="served_product")
def served(x, weight, weight_scale, input_scale, stored):
    """The product of an input, cast at its scale, and of the file's weight.

    It has the input's dtype, as the division has. `stored` is the trainer's own
    product, unused here: under `scalify` it says at which scale 16 bits are stored.
    """
    del stored
    x8 = jnp.clip(x / input_scale.astype(x.dtype), -448, 448).astype(jnp.float8_e4m3fn)
    out = jnp.matmul(x8.astype(jnp.float32), weight, precision="highest")
    return out.astype(x.dtype) * (input_scale * weight_scale).astype(x.dtype)


@composite_rule("served_product", wide=True)
def _served(call, x, weight, weight_scale, input_scale, stored):
    out = served.fun(v.unscaled(x), weight, weight_scale, input_scale, None)
    data = saturating_cast(out / stored.scale, stored.dtype)
    return v.value(data, stored.scale, stored.expected_rms, stored.dtype)


def measured(x):
    """The scale of an input that is measured, as fp8_current measures it."""
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)))
    return jnp.exp2(jnp.floor(jnp.log2(largest)) - 7)


def logits(folder, model, layout, like, tokens):
    """The logits of an export, FP32 [B, T, V].

    Args:
      folder: of the export.
      model: the trainer's, with unrolled layers.
      layout: of the family's names.
      like: the trainer's parameters, of which only dtypes and scales are used.
      tokens: [B, T].
    """
    settings, tensors = settings_and_tensors(folder)
    (group,) = settings["config_groups"].values()
    _, params = huggingface.load(folder, model.spec)
    names = {
        role.layer: name.removesuffix("weight")
        for name, role, _ in named_leaves(model.training, params, layout)
        if role.is_kernel
    }

    def product_of(path):
        name = names[path]
        if name.removesuffix(".") in settings["ignore"]:
            return narrow_gradient_dot
        weight = tensors[f"{name}weight"].astype(np.float32)
        weight = weight.T if layout.transposed else weight

        def product(x, kernel, dims, **_):
            if group["input_activations"]["dynamic"]:
                input_scale = measured(x)
            else:
                (input_scale,) = tensors[f"{name}input_scale"]
            (weight_scale,) = tensors[f"{name}weight_scale"]
            stored = fp8_dot_general(x, kernel, dims)
            return served(x, weight, weight_scale, input_scale, stored)

        return product

    policy = model.policy
    read = model.family.build(
        model.spec, compute_dtype=policy.model_dtype, dot_general_for=product_of
    )

    def store(like, p):
        if is_scaled_array(like):
            return as_scaled_array(p.astype(np.float32), like.scale, like.dtype)
        return p.astype(like.dtype)

    params = jax.tree.map(store, like, params, is_leaf=is_scaled_array)
    forward = policy.method.transform(lambda p, t: read.bind(p)(t), policy)
    return asarray(jax.jit(forward)(params, tokens))
