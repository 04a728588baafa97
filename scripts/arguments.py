"""`key=value` arguments for the scripts, in the manner of the main command.

A script describes its arguments as a frozen dataclass whose fields `argument` makes;
without a default one is required.
"""

import dataclasses
import re
import sys
import typing
from collections.abc import Callable, Sequence

from trainer.errors import UserError, run_and_flush
from trainer.text import nearest, refuse_twice


def argument(help: str, default: typing.Any = dataclasses.MISSING) -> typing.Any:
    """A field of a script's arguments."""
    return dataclasses.field(default=default, metadata={"help": help})


def read[T](cls: type[T], argv: Sequence[str]) -> T:
    """The arguments `cls` from `key=value` strings. UserError names what is unknown,
    missing or wrong.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {}
    refuse_twice(argv)
    for text in argv:
        key, separator, value = text.partition("=")
        if not separator:
            raise UserError(
                f"{text!r}: expected key=value. Valid keys: {', '.join(fields)}"
            )
        if key not in fields:
            raise UserError(f"unknown key {key}; {nearest(key, list(fields))}")
        values[key] = _convert(typing.get_type_hints(cls)[key], key, value)
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING
    ]
    if missing:
        raise UserError(
            f"missing {', '.join(f'{name}=' for name in missing)}; --help explains"
        )
    return cls(**values)


def split(text: str) -> list[str]:
    """What commas separate that are not inside brackets: `[a,b]` is one value."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _convert(hint: typing.Any, key: str, value: str) -> typing.Any:
    kinds = {int: "a whole number", float: "a number"}
    if hint not in kinds:
        return value
    try:
        return hint(value)
    except ValueError:
        raise UserError(f"{key}={value}: expected {kinds[hint]}") from None


def note(text: str) -> None:
    """Say what is going on, beside the output: on standard error."""
    print(text, file=sys.stderr, flush=True)


def usage(cls: type, name: str, about: str) -> str:
    """The text of `--help`."""
    lines = [f"usage: python -m scripts.{name} key=value ...", "", about.strip(), ""]
    for field in dataclasses.fields(cls):
        default = (
            "required"
            if field.default is dataclasses.MISSING
            else f"default {field.default!r}"
        )
        lines.append(f"  {field.name}=  {field.metadata['help']} ({default})")
    return "\n".join(lines)


def run[T](cls: type[T], name: str, about: str, main: Callable[[T], None]) -> int:
    """Read the command line and call `main`. The exit code: 0, or that of a UserError
    after its one line on stderr.

    141 where nobody reads what it prints, see `run_and_flush`.
    """

    def of_arguments() -> int:
        argv = sys.argv[1:]
        if "--help" in argv or "-h" in argv:
            print(usage(cls, name, about))
            return 0
        try:
            main(read(cls, argv))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        return 0

    return run_and_flush(of_arguments)
