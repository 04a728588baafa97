"""Totals of a run, such as its tokens.

Checkpoints store them, because batch size, replicas and the shares of a mixture may
change when a run is resumed or forked.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.fields import from_tree
from trainer.run.metadata import Totals


def continued_totals(
    meta: Mapping[str, Any], step: int, present: Callable[[int], Totals]
) -> Callable[[int], Totals]:
    """Return the totals by step of a run that continues a checkpoint.

    Args:
      meta: of the checkpoint; empty: there is none.
      step: of the checkpoint.
      present: `present(n)` returns the totals of n steps with the present settings.
    """
    if not meta:
        return present
    begin, saved = present(step), from_tree(Totals, meta["totals"], "totals")
    samples = saved.samples
    if len(samples) != len(begin.samples):  # the saved run had other sources
        samples = (0,) * len(begin.samples)

    def totals(step: int) -> Totals:
        now = present(step)
        return Totals(
            saved.tokens + now.tokens - begin.tokens,
            saved.exchanged + now.exchanged - begin.exchanged,
            saved.fp32_gradients + now.fp32_gradients - begin.fp32_gradients,
            tuple(
                was + later - start
                for was, later, start in zip(
                    samples, now.samples, begin.samples, strict=True
                )
            ),
        )

    return totals
