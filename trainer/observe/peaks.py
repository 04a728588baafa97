"""Peak matmul rates of devices, for the model FLOPs utilization (MFU)."""

import jax.numpy as jnp
from jax.typing import DTypeLike

# Dense matmul peaks of one JAX device in TFLOP/s, for operands of 32, 16, 8 and 4 bits;
# None or left out: not supported, or not published. Keyed by the start of
# `jax.Device.device_kind`. The first match holds, so specific names precede general
# ones. Figures are the makers' dense rates (half of those "with sparsity") at FP32
# accumulation. On NVIDIA GPUs with TF32, 32 bits mean TF32, which XLA's default
# precision runs. On TPU, a device is a core in v2, v3 and v7, and a chip in v4 to v6.
PEAKS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    # NVIDIA Blackwell Architecture Technical Brief, which rounds the B200's TF32 rate,
    # half of FP16's, to 1.1 PFLOP/s. HGX B300 data sheet.
    ("NVIDIA B300", (1125, 2250, 4500, 13500)),
    ("NVIDIA GB200", (1250, 2500, 5000, 10000)),
    ("NVIDIA B200", (1125, 2250, 4500, 9000)),
    # NVIDIA H100 Tensor Core GPU Architecture (white paper), table of SXM5 and PCIe;
    # H200 and H100 NVL data sheets.
    ("NVIDIA GH200", (494.7, 989.4, 1978.9)),
    ("NVIDIA H200 NVL", (417.5, 835.5, 1670.5)),
    ("NVIDIA H200", (494.7, 989.4, 1978.9)),
    ("NVIDIA H100 PCIe", (378, 756, 1513)),
    ("NVIDIA H100 NVL", (417.5, 835.5, 1670.5)),
    ("NVIDIA H100", (494.7, 989.4, 1978.9)),
    # NVIDIA A100, A10 and (AWS's variant) A10G data sheets.
    ("NVIDIA A100", (156, 312)),
    ("NVIDIA A10G", (35, 70)),
    ("NVIDIA A10", (62.5, 125)),
    # NVIDIA L40S and L4 data sheets; the L4's 120, 242 and 485 are with sparsity, so
    # they are halved and rounded.
    ("NVIDIA L40S", (183, 362, 733)),
    ("NVIDIA L4", (60, 121, 242)),
    # NVIDIA RTX Blackwell, Ada and GA102 GPU Architecture (white papers): the rates
    # "with FP32 accumulate", half of those "with FP16 accumulate".
    ("NVIDIA GeForce RTX 5090", (104.8, 209.5, 419, 1676)),
    ("NVIDIA GeForce RTX 4090", (82.6, 165.2, 330.3)),
    ("NVIDIA GeForce RTX 3090", (35.6, 71)),
    # NVIDIA V100 and T4 data sheets. Without TF32, 32 bits are FP32 on the CUDA cores.
    ("Tesla V100", (15.7, 125)),
    ("Tesla T4", (8.1, 65)),
    # Google Cloud TPU documentation, "Peak compute per chip" of each version.
    ("TPU v2", (None, 22.5)),
    ("TPU v3", (None, 61.5)),
    ("TPU v4", (None, 275)),
    ("TPU v5 lite", (None, 197)),
    ("TPU v5", (None, 459, 459)),
    ("TPU v6 lite", (None, 918, 918)),
    ("TPU7x", (None, 1153.5, 2307)),
)


def peak_flops(device_kind: str, dtype: DTypeLike) -> float | None:
    """Return the dense peak of one device in FLOP/s for matmuls of `dtype`, or None.

    It is unknown for CPUs and for MIG slices of a GPU.

    Args:
      device_kind: `jax.devices()[0].device_kind`.
      dtype: the operands' dtype, 32, 16, 8 or 4 bits wide.
    """
    if " MIG " in device_kind:
        return None
    bits = jnp.finfo(dtype).bits
    for name, rates in PEAKS:
        # Whole words only: "NVIDIA L4" must not match "NVIDIA L40".
        if device_kind == name or device_kind.startswith((f"{name} ", f"{name}-")):
            tera = dict(zip((32, 16, 8, 4), rates, strict=False)).get(bits)
            if tera is None:
                return None
            return tera * 1e12
    return None
