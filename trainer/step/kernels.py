"""XLA GPU flags, and the determinism that they give.

Two starts of a run give the same bits if they run the same kernels, and each kernel
gives the same bits every time. cuDNN's backward pass of attention does not by default:
it adds in the order in which its threads arrive. XLA measures which kernels are
fastest, and may decide otherwise the next time; the compilation cache keeps its choice.
"""

import contextlib
import json
import unittest.mock
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal

from trainer.precision.policy import Policy

Deterministic = Literal["auto", "true", "false"]  # the key of that name


class Kernels(StrEnum):
    """The choice of GPU kernels by XLA.

    Attributes:
      FASTEST: the fastest ones, also those that sum in another order each time;
        measured at each compilation.
      KEPT: the fastest ones that sum in one order; the choice is kept with the compiled
        programs.
      FIXED: the first of each library that sums in one order; nothing is measured.
    """

    FASTEST = "fastest"
    KEPT = "kept"
    FIXED = "fixed"

    @classmethod
    def chosen(cls, deterministic: Deterministic | None, *, cached: bool) -> "Kernels":
        """Return the choice for a value of `deterministic`; None: as auto.

        `cached`: whether there is a compilation cache.
        """
        if deterministic == "false":
            return cls.FASTEST
        return cls.KEPT if cached and deterministic != "true" else cls.FIXED


def takes_scales(policy: Policy) -> bool:
    """Return whether the precision has FP8 products with constant scales
    (`compiler_hints.scales_in_products`).
    """
    return policy.scaled and policy.forward is not None


def takes_any_order(device: Any) -> bool:
    """Return whether cuBLASLt's FP8 products read operands in any order on a device
    (`compiler_hints.products_in_any_order`): on Blackwell, but not on its GeForce GPUs,
    of compute capability 12.
    """
    major, _, _ = str(getattr(device, "compute_capability", "0")).partition(".")
    return major in ("10", "11")


def gpu_options(policy: Policy, kernels: Kernels = Kernels.KEPT) -> dict[str, Any]:
    """Return the options of XLA's GPU compiler that differ from its defaults."""
    # By default XLA drops a rounding to 16 bits that is widened again later, and stores
    # the FP32 number.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if takes_scales(policy):
        # Imported here: the schema of the configuration does without JAX.
        from scalify_core.numerics import compiler_hints

        options |= compiler_hints.PRODUCT_OPTIONS
    if kernels is not Kernels.FASTEST:
        options["xla_gpu_exclude_nondeterministic_ops"] = True
        # With that, XLA (jax 0.11.2) takes Triton off the list of those that a
        # product's kernel may come from, and fails for every product that it has
        # already written for Triton: "No supported config found".
        options["xla_gpu_enable_triton_gemm"] = False
    if kernels is Kernels.FIXED:
        options["xla_gpu_deterministic_ops"] = True  # also: measure nothing
    return options


@contextlib.contextmanager
def marked_attention(kernels: Kernels) -> Iterator[None]:
    """Lower each backward pass of cuDNN's attention as one that sums in one order.

    `gpu_options` demand that kernel. XLA (jax 0.11.2) then writes so into the first of
    equal calls only, and at the first step of a model of several layers does not find
    the kernels of the others: "IndexError: raw_hash_map<>::at"
    (https://github.com/openxla/xla/pull/46500). Calls that already say so are equal.
    """
    if kernels is Kernels.FASTEST:
        yield
        return
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


def promise(kernels: Kernels, platform: str, cache: str | None) -> str:
    """Return a line that says whether a run is deterministic, and why.

    Args:
      kernels: of its programs.
      platform: of its devices: cpu, gpu.
      cache: the directory of compiled programs; None: there is none.
    """
    if platform != "gpu":
        return "deterministic: yes (also across resume, on this machine)"
    match kernels:
        case Kernels.FASTEST:
            return (
                "deterministic: no, with deterministic=false: kernels sum in any order,"
                " and each start measures anew which kernels are the fastest"
            )
        case Kernels.KEPT:
            return (
                f"deterministic: yes (also across resume) while compile_cache={cache}"
                " is kept, which has the fastest kernels; deterministic=true needs no"
                " cache, but is slower"
            )
        case Kernels.FIXED:
            line = (
                "deterministic: yes (also across resume, on this kind of GPU with these"
                " versions)"
            )
            if cache:
                return line
            return (
                f"{line}; compile_cache=null, so nothing is measured: slower than with"
                " a cache"
            )
