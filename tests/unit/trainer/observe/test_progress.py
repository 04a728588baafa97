"""An operation that takes long says so while it lasts; a quick one says nothing."""

import time

from trainer.observe import progress


def test_a_long_operation_says_so_while_it_lasts_and_how_long_it_took(
    monkeypatch,
):
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    heard = []
    with progress.log_duration("compiling the step", heard.append):
        until = time.monotonic() + 30
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
        assert heard == ["compiling the step ..."]
    assert heard[1].startswith("compiling the step: ")
    assert heard[1].endswith(" s")
