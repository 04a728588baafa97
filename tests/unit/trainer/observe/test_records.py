"""A row with extremes over the layers where each layer would be too much."""

import pytest

from trainer.errors import UserError
from trainer.observe.records import (
    Sample,
    encode_sample,
    is_row,
    read_rows,
    read_samples,
    without_layers,
)


def numerics(layer, exponent, rms, underflow=0.0, saturated=0.0):
    prefix = f"numerics/weights/{layer}"
    return {
        f"{prefix}/exponent": exponent,
        f"{prefix}/rms": rms,
        f"{prefix}/underflow": underflow,
        f"{prefix}/saturated": saturated,
    }


def test_a_row_has_a_step_that_a_run_can_take():
    assert [is_row({"step": step, "lr": 1.0}) for step in (0, 7)] == [True, True]
    steps = (-1, 1.0, "1", True, None)
    assert not any(is_row({"step": step, "lr": 1.0}) for step in steps)


def test_a_text_of_a_log_can_be_written_by_a_tracker(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text(
        '{"step": 5, "event": "a\\uD800é"}\n{"step": 6, "b\\udfff": "NaN"}\n'
    )
    rows = [{"step": 5, "event": "a?é"}, {"step": 6, "b?": "NaN"}]
    assert read_rows(log) == rows
    log.write_bytes(b'{"step": 5, "event": "a\xed\xa0\x80"}\n')
    with pytest.raises(UserError, match="jsonl:1 is not a row"):
        read_rows(log)
    file = tmp_path / "samples.txt"
    file.write_text('step 5 | "a\\ud800é"\n  text\n')
    assert read_samples(file) == [Sample(5, "a?é", "text")]
    file.write_bytes(encode_sample(Sample(5, "a\ud800é", "te\ud800xt")))
    assert read_samples(file) == [Sample(5, "a?é", "te?xt")]


def test_extremes_over_the_layers_are_left_and_zeros_set_none():
    row, zeros = {"train/loss": 2.0, "tokens": 7}, numerics("h.0.bias", -126, 0.0)
    layers = numerics("wte", -5, 1.5, 0.25, 1e-3) | numerics("h.0", -3.0, 0.5) | zeros
    assert without_layers(row | layers) == row | {
        "numerics/weights/underflow_max": 0.25,
        "numerics/weights/saturated_max": 1e-3,
        "numerics/weights/rms_min": 0.5,
        "numerics/weights/rms_max": 1.5,
        "numerics/weights/exponent_min": -5,
        "numerics/weights/exponent_max": -3,
    }
    shares = ("numerics/weights/underflow_max", "numerics/weights/saturated_max")
    assert without_layers(zeros) == dict.fromkeys(shares, 0)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("figure", ["exponent", "rms", "underflow", "saturated"])
def test_a_figure_that_a_layer_lacks_or_that_is_nan_is_not_hidden(figure, order):
    """Somebody may have edited the log that a tracker gets at a resume."""
    complete, damaged = numerics("wpe", -5, 1.0), numerics("wte", -5, 1.0)
    expected = without_layers(complete)
    key = f"numerics/weights/wte/{figure}"
    missing = {name: value for name, value in damaged.items() if name != key}
    for row in (missing, damaged | {key: "NaN"}):
        first, second = [row, complete][::order]
        actual = without_layers(first | second)
        changed = {name for name in expected if actual[name] != expected[name]}
        assert changed == {name for name in expected if f"/{figure}_" in name}
