"""Errors that a user can cause. Each is one line: what was found, what is valid, what to do next.

`__main__` prints the message without a traceback and exits with `exit_code`.
"""

from typing import ClassVar


class UserError(Exception):
    """Bad configuration, data, or environment. Exit code 2."""

    exit_code: ClassVar[int] = 2


class Diverged(UserError):
    """The watchdog stopped the run: too many steps in a row were not finite. Exit code 3."""

    exit_code: ClassVar[int] = 3
