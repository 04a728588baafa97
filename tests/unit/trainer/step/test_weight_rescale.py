"""The powers of two by which weights' data is brought to its place."""

import math

import pytest

from trainer.models.roles import Role
from trainer.step.weight_rescale import rescale_factors

COLUMN, ROW = Role("column", gated=True), Role("row", gated=True)
ROLES = {
    "h": [
        {
            "mlp": {
                "down": {"kernel": ROW},
                "gate": {"kernel": COLUMN},
                "up": {"kernel": COLUMN},
            }
        },
        {
            "mlp": {
                "down": {"kernel": ROW},
                "gate": {"kernel": COLUMN},
                "up": {"kernel": COLUMN},
            }
        },
    ],
    "table": Role("table"),
    "gain": Role("gain"),
}
OTHERS = {"['table']": 1.0, "['gain']": 1.0}


def rms_of(down, gate, up, layer=0):
    return {
        f"['h'][{layer}]['mlp']['{name}']['kernel']": x
        for name, x in zip(("down", "gate", "up"), (down, gate, up), strict=True)
    }


def test_data_is_moved_to_the_nearest_octave():
    assert rescale_factors({"['table']": 5.0, "['gain']": 0.3}, ROLES) == {
        "['table']": 4.0,
        "['gain']": 0.25,
    }


@pytest.mark.parametrize("rms", [0.0, math.nan, math.inf])
def test_data_without_a_size_stays_where_it_is(rms):
    assert rescale_factors({"['table']": rms, "['gain']": 2.0}, ROLES) == {
        "['gain']": 2.0
    }


@pytest.mark.parametrize(
    "sizes",
    [(1.1, 2.6, 2.6), (0.9, 0.75, 0.74), (1.4, 1.4, 1.4), (4.4, 2.7, 1.1), (1, 1, 1)],
)
def test_the_branches_of_a_gated_layer_are_placed_together_and_the_kernel_behind_them_below_what_is_expected(
    sizes,
):
    rms = rms_of(*sizes)
    powers = rescale_factors(rms, ROLES)
    down, gate, up = (rms[path] / powers[path] for path in rms)
    assert math.sqrt(0.5) <= gate <= math.sqrt(2)
    assert math.sqrt(0.5) <= gate * up <= math.sqrt(2)
    assert 0.5 <= down * max(gate, up) <= 1


def test_what_a_gate_leaves_over_is_for_its_own_layer():
    """Both branches of the first layer are 1.3 times an octave: one of them goes up.
    Those of the second are even."""
    rms = rms_of(1.0, 1.3, 1.3) | rms_of(1.0, 1.0, 1.3, layer=1)
    powers = rescale_factors(rms, ROLES)
    assert [powers[path] for path in rms] == [2.0, 1.0, 2.0, 2.0, 1.0, 1.0]
