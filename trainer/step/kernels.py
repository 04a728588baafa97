"""What XLA's compiler for GPUs is told of the step and of all that is computed beside
it, and which bits that promises.

Two starts of a run give the same bits if they run the same kernels, and if each kernel
gives the same bits every time. cuDNN's backward pass of attention sums in the order in
which its threads arrive, unless it is told not to. Which kernels are the fastest XLA
finds out by running them, and may find otherwise the next time; the compilation cache
keeps what it found.
"""

from enum import StrEnum
from typing import Any, Literal

from trainer.precision.policy import Policy

Asked = Literal["auto", "true", "false"]  # the key `deterministic`


class Kernels(StrEnum):
    """How kernels are chosen.

    Attributes:
      FASTEST: also those that sum in another order each time; measured at each
          compilation.
      KEPT: those that sum in one order; measured, and the choice is kept beside the
          compiled programs.
      FIXED: those that sum in one order; the first of each library's list, not
          measured.
    """

    FASTEST = "fastest"
    KEPT = "kept"
    FIXED = "fixed"

    @classmethod
    def of(cls, asked: Asked | None, *, cached: bool) -> "Kernels":
        """What a value of `deterministic` means where there is a compilation cache, or
        none; None: as auto.
        """
        if asked == "false":
            return cls.FASTEST
        return cls.KEPT if cached and asked != "true" else cls.FIXED


def takes_scales(policy: Policy) -> bool:
    """Return whether programs of the precision have FP8 products with constants
    (`lowering.scales_in_products`).
    """
    return policy.scaled and policy.forward is not None


def gpu_options(policy: Policy, kernels: Kernels = Kernels.KEPT) -> dict[str, Any]:
    """What XLA's compiler for GPUs is to do otherwise than by default."""
    # By default it drops a rounding to 16 bits that is widened again later, and stores
    # the FP32 number instead.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if takes_scales(policy):
        # imports JAX, which the schema of the configuration does without
        from scalify_core import lowering

        options |= lowering.PRODUCT_OPTIONS
    if kernels is not Kernels.FASTEST:
        options["xla_gpu_exclude_nondeterministic_ops"] = True
        # With that, XLA (jax 0.11.2) takes Triton off the list of those that a
        # product's kernel may come from, and fails for every product that it has
        # already written for Triton: "No supported config found".
        options["xla_gpu_enable_triton_gemm"] = False
    if kernels is Kernels.FIXED:
        options["xla_gpu_deterministic_ops"] = True  # as above, and nothing is measured
    return options


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
            why = (
                ""
                if cache
                else (
                    "; compile_cache=null, so nothing is measured: slower than with a"
                    " cache"
                )
            )
            return (
                "deterministic: yes (also across resume, on this kind of GPU with"
                f" these versions){why}"
            )
