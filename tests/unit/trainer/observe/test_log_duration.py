"""An operation that takes long says so while it lasts; a quick one says nothing."""

import time

import pytest

from trainer.observe.progress import log_duration


def test_a_long_operation_says_so_while_it_lasts_and_how_long_it_took():
    heard = []
    with log_duration("compiling the step", heard.append, seconds=0.05):
        until = time.monotonic() + 30
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
        assert heard == ["compiling the step ..."]
    assert heard[1].startswith("compiling the step: ")
    assert heard[1].endswith(" s")


def test_an_error_goes_through_and_ends_the_waiting():
    heard = []
    with (
        pytest.raises(ValueError, match="x"),
        log_duration("compiling", heard.append, seconds=0.05),
    ):
        raise ValueError("x")
    time.sleep(0.1)
    assert heard == []
