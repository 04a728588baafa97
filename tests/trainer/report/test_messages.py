"""What a run says of itself."""

import numpy as np

from trainer.report.messages import schedule_change, text_of


def test_a_longer_schedule_is_told_by_its_learning_rates():
    before, now = np.float32([4, 3, 2, 1]), np.float32([4, 3.5, 3, 2.5, 2, 1.5, 1])
    (line,) = schedule_change(4, before, now)
    assert "train.steps=7, was 4" in line
    assert "from 1.00e+00 in step 4 to 2.00e+00 in step 5" in line


def test_a_schedule_that_goes_on_as_before_is_not_worth_a_line():
    rates = np.float32([1, 2, 2, 2, 2])
    assert schedule_change(3, rates, rates) == []
    assert schedule_change(3, rates, np.float32([2, 2, 2, 2])) == []  # only the warm-up, which is over, was another
    assert schedule_change(4, rates, np.float32([4, 3, 2, 1])) == []  # it ends here


def test_a_source_is_named_for_a_reader():
    assert text_of({"kind": "embedded"}) == "the King James Bible"
    assert text_of({"kind": "hub", "name": "org/set"}) == "org/set"
    assert text_of({"kind": "text", "paths": ["a.txt", "b.txt"]}) == "a.txt, b.txt"
