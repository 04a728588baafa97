"""What of a family of cases is chosen for `make test`."""

from typing import Any

import pytest


def whole(*values: Any) -> Any:
    """A case of `make test-all` alone: what it shows, others of its family or a test that a comment names show."""
    return pytest.param(*values, marks=pytest.mark.whole)
