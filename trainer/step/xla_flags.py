"""XLA GPU flags, and the determinism that they give.

Two starts of a run give the same bits if they run the same kernels, and the kernels are
deterministic. By default cuDNN's backward pass of attention is not: it adds in the
order in which its threads arrive. XLA's autotuning may choose other kernels at the next
compilation. The compilation cache keeps its choice.
"""

import contextlib
import json
import unittest.mock
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal

from trainer.errors import UserError
from trainer.precision.policy import Policy

# Values of the key `deterministic`; null is auto.
Deterministic = Literal["auto", "true", "false"]


class KernelChoice(StrEnum):
    """The choice of GPU kernels by XLA.

    Attributes:
      FASTEST: autotuned at each compilation, nondeterministic kernels among them.
      CACHED: autotuned among deterministic kernels; the compilation cache keeps the
        choice.
      FIXED: the first deterministic kernel of each library, without autotuning.
    """

    FASTEST = "fastest"
    CACHED = "cached"
    FIXED = "fixed"

    @classmethod
    def chosen(
        cls, deterministic: Deterministic | None, *, cached: bool
    ) -> "KernelChoice":
        """Return the choice for a value of `deterministic`; None is auto.

        `cached`: whether there is a compilation cache.
        """
        if deterministic == "false":
            return cls.FASTEST
        # Without a cache each start would autotune again, perhaps to other kernels.
        if deterministic == "true" or not cached:
            return cls.FIXED
        return cls.CACHED


def has_constant_fp8_scales(policy: Policy) -> bool:
    """Return whether the precision has FP8 matmuls with constant scales
    (`compiler_hints.scales_in_products`).
    """
    return policy.scaled and policy.forward is not None


def takes_any_layout(device: Any) -> bool:
    """Return whether cuBLASLt's FP8 matmuls on a device take operands of any memory
    layout (`compiler_hints.products_in_any_layout`).

    Blackwell does (compute capability 10 and 11), except its GeForce GPUs (12).
    """
    # Devices of a CPU have no compute capability.
    major, _, _ = str(getattr(device, "compute_capability", "0")).partition(".")
    return major in ("10", "11")


def gpu_options(policy: Policy, kernels: KernelChoice) -> dict[str, Any]:
    """Return the options of XLA's GPU compiler that differ from its defaults."""
    # By default XLA may remove a cast to 16 bits and back to FP32, and with it the
    # rounding.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if has_constant_fp8_scales(policy):
        # Imported here: the schema of the configuration must not import JAX.
        from scalify_core.numerics import compiler_hints

        options |= compiler_hints.PRODUCT_OPTIONS
    if kernels is not KernelChoice.FASTEST:
        options["xla_gpu_exclude_nondeterministic_ops"] = True
        # With that flag XLA (jax 0.11.2) removes Triton from the backends of a matmul.
        # It fails for every matmul that it has already lowered to Triton: "No supported
        # config found".
        options["xla_gpu_enable_triton_gemm"] = False
    if kernels is KernelChoice.FIXED:
        options["xla_gpu_deterministic_ops"] = True  # disables autotuning, too
    return options


@contextlib.contextmanager
def marked_attention(kernels: KernelChoice) -> Iterator[None]:
    """Lower each backward pass of cuDNN's attention as deterministic.

    `gpu_options` demands deterministic kernels. XLA (jax 0.11.2) then marks only the
    first of several identical calls, and the first step of a model of several layers
    fails: "IndexError: raw_hash_map<>::at"
    (https://github.com/openxla/xla/pull/46500). Calls that are all marked beforehand
    stay identical.
    """
    if kernels is KernelChoice.FASTEST:
        yield
        return
    # A private module: compare this function with JAX's at each new version of it.
    from jax._src.cudnn import fused_attention_stablehlo as attention

    name = "create_dot_product_attention_backend_config"
    unmarked = getattr(attention, name)

    def marked(*args: Any, is_bwd: bool) -> str:
        text = unmarked(*args, is_bwd=is_bwd)
        if not is_bwd:
            return text
        config = json.loads(text)
        config["cudnn_fmha_backend_config"]["force_deterministic"] = True
        return json.dumps(config)

    with unittest.mock.patch.object(attention, name, marked):
        yield


def check_deterministic(deterministic: Deterministic | None, policy: Policy) -> None:
    """Raise UserError for FP8 attention on a GPU with `deterministic=true`."""
    if deterministic == "true" and policy.has_fp8_attention:
        raise UserError(
            f"deterministic=true with precision.attention={policy.attention}: XLA (jax"
            " 0.11.2) has no deterministic form of the backward pass of FP8 attention;"
            " leave one of them out"
        )


def determinism_message(
    kernels: KernelChoice,
    platform: str,
    cache: str | None,
    *,
    has_fp8_attention: bool = False,
) -> str:
    """Return a line that says whether a run is deterministic, and why.

    Args:
      kernels: the choice of GPU kernels.
      platform: platform of the devices: cpu, gpu.
      cache: directory of the compilation cache; None: there is none.
      has_fp8_attention: whether attention is cuDNN's FP8 kernel.
    """
    if platform != "gpu":
        return "deterministic: yes (also across resume, on this machine)"
    if has_fp8_attention:
        return (
            "deterministic: no, with precision.attention: the backward pass of FP8"
            " attention may sum in any order"
        )
    match kernels:
        case KernelChoice.FASTEST:
            return (
                "deterministic: no, with deterministic=false: kernels sum in any order,"
                " and each start measures anew which kernels are the fastest"
            )
        case KernelChoice.CACHED:
            return (
                f"deterministic: yes (also across resume) while compile_cache={cache}"
                " is kept, which has the fastest kernels; deterministic=true needs no"
                " cache, but is slower"
            )
        case KernelChoice.FIXED:
            line = (
                "deterministic: yes (also across resume, on this kind of GPU with these"
                " versions)"
            )
            if cache:
                return line
            return (
                f"{line}; compile_cache=null, so kernels are not autotuned, which is"
                " slower"
            )
