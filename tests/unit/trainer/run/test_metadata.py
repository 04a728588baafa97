"""Metadata of checkpoints from strangers."""

import pytest

from trainer.errors import UserError
from trainer.run.metadata import validate_metadata


def test_numbers_that_no_run_writes_are_refused():
    for odd in (
        {"watchdog": {"losses": [1e308] * 300}},
        {"unfinished": '{"step": 3, "a": 1}'},
    ):
        with pytest.raises(UserError, match="checkpoint 3"):
            validate_metadata(odd, {}, "checkpoint 3")
