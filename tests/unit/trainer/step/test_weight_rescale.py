"""The powers of two by which the data of weights is rescaled."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from beside_plain import HALF
from numpy.testing import assert_allclose, assert_array_equal

from scalify_core import ScaledArray
from scalify_core.numerics.formats import FP16
from trainer.models.roles import Role
from trainer.step.weight_rescale import (
    rescale_factors,
    rescale_params,
    rms_of_params,
)

COLUMN, ROW = Role("column", gated=True), Role("row", gated=True)
MLP = {"down": {"kernel": ROW}, "gate": {"kernel": COLUMN}, "up": {"kernel": COLUMN}}
ROLES = {
    "h": [{"mlp": MLP}, {"mlp": MLP}],
    "table": Role("table"),
    "gain": Role("gain"),
}


def rms_of(down, gate, up, layer=0):
    return {
        f"['h'][{layer}]['mlp']['{name}']['kernel']": x
        for name, x in zip(("down", "gate", "up"), (down, gate, up), strict=True)
    }


@pytest.mark.parametrize("rms", [0.0, math.nan, math.inf])
def test_data_is_moved_to_the_nearest_octave_and_stays_where_it_has_no_size(rms):
    powers = rescale_factors({"['table']": 5.0, "['gain']": 0.3}, ROLES)
    assert powers == {"['table']": 4.0, "['gain']": 0.25}
    powers = rescale_factors({"['table']": rms, "['gain']": 2.0}, ROLES)
    assert powers == {"['gain']": 2.0}


@pytest.mark.parametrize(
    "sizes",
    [(1.1, 2.6, 2.6), (0.9, 0.75, 0.74), (1.4, 1.4, 1.4), (4.4, 2.7, 1.1), (1, 1, 1)],
)
def test_the_kernels_of_a_gated_layer_are_placed_together(sizes):
    rms = rms_of(*sizes)
    powers = rescale_factors(rms, ROLES)
    down, gate, up = (rms[path] / powers[path] for path in rms)
    assert math.sqrt(0.5) <= gate <= math.sqrt(2)
    assert math.sqrt(0.5) <= gate * up <= math.sqrt(2)
    assert 0.5 <= down * max(gate, up) <= 1


def test_the_remainder_of_a_gate_is_for_its_own_layer():
    """Both branches of the first layer are 1.3 times an octave: one of them goes up.
    Those of the second are even."""
    rms = rms_of(1.0, 1.3, 1.3) | rms_of(1.0, 1.0, 1.3, layer=1)
    powers = rescale_factors(rms, ROLES)
    assert [powers[path] for path in rms] == [2.0, 1.0, 2.0, 2.0, 1.0, 1.0]


def test_only_named_weights_are_rescaled_and_their_values_stay_exactly():
    data = jnp.array([1, -1, 1, 1], HALF)
    params = {
        "low": ScaledArray(data / 25, 2.0**-3),
        "high": ScaledArray(data * 100, jnp.float32(2.0)),
        "broken": ScaledArray(data * jnp.nan, 1.0),
        "plain": data,
    }
    rms = rms_of_params(params)
    assert list(rms) == ["['broken']", "['high']", "['low']"]
    assert_allclose(list(rms.values()), [np.nan, 100, 0.04], rtol=FP16.epsilon / 2)
    new = rescale_params(params, {"['low']": 2.0**-5, "['high']": 2.0**7})
    assert (new["low"].scale, float(new["high"].scale)) == (2.0**-8, 2.0**8)
    assert (new["low"].is_static, new["high"].is_static) == (True, False)
    for name in params:
        assert (new[name] is params[name]) == (name not in ("low", "high"))
        assert_array_equal(np.asarray(new[name]), np.asarray(params[name]))
