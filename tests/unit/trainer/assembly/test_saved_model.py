"""The step of a checkpoint, as it is typed."""

import pytest

from trainer.assembly.saved_model import parse_step
from trainer.errors import UserError


@pytest.mark.parametrize("step", ["9" * 5000, "-1", "1.5", "last"])
def test_what_is_no_step_is_one_line(step):
    with pytest.raises(UserError, match=r"^step=.{1,100}: expected newest, best, or a"):
        parse_step(None, step)


def test_a_step_is_a_number_or_a_name():
    assert parse_step(None, "newest") is None
    assert [parse_step(None, step) for step in (7, "7")] == [7, 7]
