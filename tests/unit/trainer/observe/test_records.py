"""What is left of a row where each layer would be too much."""

import pytest

from trainer.observe.records import without_layers


def numerics(layer, exponent, rms, underflow=0.0, saturated=0.0):
    figures = {
        "exponent": exponent,
        "rms": rms,
        "underflow": underflow,
        "saturated": saturated,
    }
    return {
        f"numerics/weights/{layer}/{name}": value for name, value in figures.items()
    }


def test_of_each_class_the_extremes_over_the_layers_are_left_and_zeros_set_none():
    row = {"train/loss": 2.0, "tokens": 7}
    layers = numerics("wte.embedding", -5, 1.5, 0.25, 1e-3) | numerics(
        "h.0.mlp.c_fc.kernel", -3.0, 0.5
    )
    layers |= numerics("h.0.mlp.c_fc.bias", -126, 0.0)
    assert without_layers(row | layers) == row | {
        "numerics/weights/underflow_max": 0.25,
        "numerics/weights/saturated_max": 1e-3,
        "numerics/weights/rms_min": 0.5,
        "numerics/weights/rms_max": 1.5,
        "numerics/weights/exponent_min": -5,
        "numerics/weights/exponent_max": -3,
    }
    assert without_layers(numerics("h.0.mlp.c_fc.bias", -126, 0.0)) == {
        "numerics/weights/underflow_max": 0,
        "numerics/weights/saturated_max": 0,
    }
    assert without_layers(row) == row


@pytest.mark.parametrize("order", [1, -1])
def test_a_layer_that_is_not_a_number_is_not_hidden_by_the_others(order):
    lost = numerics("wte.embedding", -5, "NaN")  # as metrics.jsonl has it
    first, second = [lost, numerics("wpe.embedding", -5, 1.0)][::order]
    actual = without_layers(first | second)
    assert (
        str(actual["numerics/weights/rms_min"])
        == str(actual["numerics/weights/rms_max"])
        == "nan"
    )
    assert actual["numerics/weights/exponent_min"] == -5


@pytest.mark.parametrize("missing", ["exponent", "rms", "underflow", "saturated"])
def test_a_figure_that_a_layer_lacks_is_not_a_number(missing):
    """Somebody may have edited the log that a tracker gets at a resume."""
    torn = numerics("wte.embedding", -5, 1.0)
    del torn[f"numerics/weights/wte.embedding/{missing}"]
    whole = numerics("wpe.embedding", -5, 1.0)
    complete = without_layers(whole)
    for row in (torn, torn | whole):
        short_row = without_layers(row)
        assert short_row.keys() == complete.keys()
        lost = {name for name, value in short_row.items() if value != complete[name]}
        assert lost == {name for name in complete if f"/{missing}_" in name}
