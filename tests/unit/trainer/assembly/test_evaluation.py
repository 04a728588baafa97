"""An evaluation on one device of a run that was trained on many."""

import math
from types import SimpleNamespace

import pytest

from trainer.assembly.evaluation import MICRO_BATCH, micro_batches, result_of


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


def test_a_result_has_its_mean_its_bits_per_byte_and_its_distance_to_the_reference():
    batches = SimpleNamespace(bytes_per_token=4.0)
    result = result_of(batches, "bf16", [1.0, 3.0], [1.5, 2.0])
    assert (result.precision, result.loss, result.difference) == ("bf16", 2.0, 0.25)
    assert result.bits_per_byte == pytest.approx(2 / math.log(2) / 4)
