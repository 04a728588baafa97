"""Totals of a run, such as its tokens.

Checkpoints store them, because batch size, replicas and the shares of a mixture may
change when a run is resumed or forked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from trainer.bounds import Bound
from trainer.config.fields import from_tree

Count = Annotated[int, Bound(lambda x: 0 <= x < 2**63, "0 to 2^63 - 1")]
NumBytes = Annotated[float, Bound(lambda x: 0 <= x < 1e100, "0 to 1e100")]


@dataclass(frozen=True)
class Totals:
    """Totals since the first step; a fork continues those of its run.

    Attributes:
      tokens: number of tokens trained on.
      exchanged: bytes that each DiLoCo replica has sent to the others.
      fp32_gradients: bytes that it would have sent if FP32 gradients were all-reduced
        in every step.
      samples: number of samples from each source of a mixture.
    """

    tokens: Count
    exchanged: NumBytes = 0.0
    fp32_gradients: NumBytes = 0.0
    samples: tuple[Count, ...] = ()


def continued_totals(
    meta: Mapping[str, Any], step: int, computed_totals: Callable[[int], Totals]
) -> Callable[[int], Totals]:
    """Return the totals by step of a run that continues a checkpoint.

    They are the saved ones, and those of the steps since then.

    Args:
      meta: the checkpoint's metadata; empty: there is no checkpoint.
      step: the checkpoint's step.
      computed_totals: `computed_totals(n)` returns the totals of n steps, all of them
        with the current settings.
    """
    if not meta:
        return computed_totals
    saved = from_tree(Totals, meta["totals"], "totals")
    # Of `step` steps with the current settings, to be subtracted below: only the steps
    # after the checkpoint were taken with them.
    at_checkpoint = computed_totals(step)
    saved_samples = saved.samples
    if len(saved_samples) != len(at_checkpoint.samples):  # there were other sources
        saved_samples = (0,) * len(at_checkpoint.samples)

    def totals(step: int) -> Totals:
        now = computed_totals(step)
        counts = zip(saved_samples, now.samples, at_checkpoint.samples, strict=True)
        return Totals(
            saved.tokens + now.tokens - at_checkpoint.tokens,
            saved.exchanged + now.exchanged - at_checkpoint.exchanged,
            saved.fp32_gradients + now.fp32_gradients - at_checkpoint.fp32_gradients,
            tuple(
                saved_count + count - checkpoint_count
                for saved_count, count, checkpoint_count in counts
            ),
        )

    return totals
