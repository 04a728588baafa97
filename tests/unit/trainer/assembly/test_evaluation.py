"""An evaluation on one device of a run that was trained on many."""

import pytest

from trainer.assembly.evaluation import MICRO_BATCH, micro_batches


@pytest.mark.parametrize(
    ("rows", "tokens", "accum", "expected"),
    [
        (32, 1025, 4, 4),  # as in the training
        (512, 1025, 1, 16),
        (480, 1025, 2, 8),
        (7 * 64, 1025, 7, 14),
        (10, 2 * MICRO_BATCH, 2, 10),
        (2**30, 2, 1, 2**15),  # forged
    ],
)
def test_a_micro_batch_of_an_evaluation_fits_on_one_device(
    rows, tokens, accum, expected
):
    actual = micro_batches(rows, tokens, accum)
    assert actual == expected
    assert rows % actual == actual % accum == 0
    assert rows // actual in (1, *range(1, MICRO_BATCH // tokens + 1))
