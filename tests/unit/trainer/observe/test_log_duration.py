"""What takes long says so while it lasts; what is quick says nothing."""

import time

import pytest

from trainer.observe.progress import log_duration, log_first_duration


def test_what_is_quick_says_nothing():
    heard = []
    with log_duration("compiling", heard.append, seconds=5):
        pass
    assert heard == []


def test_what_takes_long_says_so_while_it_lasts_and_how_long_it_took():
    heard = []
    with log_duration("compiling the step", heard.append, seconds=0.05):
        until = time.monotonic() + 30
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
        assert heard == ["compiling the step ..."]
    assert len(heard) == 2
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


def test_only_the_first_call_is_said(monkeypatch):
    heard = []

    def slow(x):
        time.sleep(0.1)
        return x + 1

    monkeypatch.setattr(
        "trainer.observe.progress.log_duration",
        lambda what, say: log_duration(what, say, seconds=0.02),
    )
    calling = log_first_duration(slow, "compiling the validation", heard.append)
    assert (calling(1), calling(2)) == (2, 3)
    assert [text.split(":")[0] for text in heard] == [
        "compiling the validation ...",
        "compiling the validation",
    ]
