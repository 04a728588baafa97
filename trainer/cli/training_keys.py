"""Commands that take the keys of training in addition to their own."""

from collections.abc import Callable, Iterator, Sequence

from trainer.cli.arguments import (
    asks_for_help,
    command_help,
    names_of,
    nearest_keys,
    parse,
    run_main,
    table,
    with_choices,
    without_dashes,
    wrapped,
)
from trainer.config.composition import is_override
from trainer.config.reference import Group, reference
from trainer.errors import UserError
from trainer.text import check_unique_keys, key_of, show

# config=FILE names a file of keys; the schema has no such key.
CONFIG = "config"


def training_keys(group_name: str | None = None) -> list[str]:
    """Return the groups and keys of training, or of one group, as they are typed."""
    # Composed by Hydra, in half a second.
    groups = reference()
    names = [group.name for group in groups if group.choices]
    keys = [CONFIG, *names, *(key.name for group in groups for key in group.keys)]
    return [key for key in keys if group_name in (None, key.partition(".")[0])]


def run_with_training_keys[T](
    cls: type[T],
    program: str,
    about: str,
    main: Callable[[T, list[str]], None],
    argv: Sequence[str],
    group_name: str | None = None,
) -> int:
    """Call `main` with a command's own arguments and the keys of training.

    Return the exit code. The command takes the keys of group `group_name`, or of all
    groups if that is None.
    """
    command_keys = names_of(cls)

    def call() -> None:
        # Before the split: a key may be the command's and training's.
        check_unique_keys(argv)
        main(*split_arguments(cls, argv, group_name))

    def show_help() -> None:
        usage = f"{program} [key=value ...] [group=choice ...]"
        overrides = [
            text
            for text in argv
            if is_override(text) and key_of(text) not in command_keys
        ]
        show_training_help(usage, about, overrides, cls, group_name)

    return run_main(show_help if asks_for_help(argv) else call)


def split_arguments[T](
    cls: type[T], argv: Sequence[str], group_name: str | None = None
) -> tuple[T, list[str]]:
    """Return a command's own arguments, and the overrides of training's keys.

    Raises:
      UserError: a key that is neither the command's nor training's.
    """
    command_keys = names_of(cls)
    argv = without_dashes(argv, lambda: [*command_keys, *training_keys(group_name)])
    command_argv = [text for text in argv if key_of(text) in command_keys]
    overrides = [text for text in argv if key_of(text) not in command_keys]
    for text in overrides:
        if not is_override(text):
            raise UserError(f"{text!r}: expected key=value; --help lists the keys")
        key = key_of(text)
        if "." in key and group_name in (None, key.partition(".")[0]):
            continue  # `compose_config` reports an unknown key.
        valid = training_keys(group_name)
        # A key without a dot is a group or a top-level key; Hydra would not name the
        # command's keys.
        if key not in {name.partition(".")[0] for name in valid}:
            close = nearest_keys(key, [*command_keys, *valid])
            hint = f"did you mean {' or '.join(close)}? Valid" if close else "valid"
            raise UserError(
                f"unknown key {key}; {hint}: {', '.join(command_keys)}, and keys"
                f" of {group_name or 'training'}; --help explains them"
            )
    return parse(cls, command_argv), overrides


def show_training_help(
    usage: str,
    about: str,
    overrides: Sequence[str],
    cls: type | None = None,
    group_name: str | None = None,
) -> None:
    """Print the help of a command that takes keys of training, with their values.

    The values are those under `overrides`. `cls` has the command's own keys, which
    replace keys of training with the same names. Raises UserError for an invalid
    override.
    """
    command_keys = [] if cls is None else names_of(cls)
    parts = [f"usage: {usage}", wrapped(about)]
    if cls is not None:
        parts.append("\n".join(command_help(cls)))
    for group in reference(overrides):
        if group_name is None or group.name == group_name:
            # The command's own key of that name wins in `split_arguments`, too.
            keys = tuple(key for key in group.keys if key.name not in command_keys)
            parts.append("\n".join(_group_lines(group._replace(keys=keys))))
    show("\n\n".join(filter(None, parts)))


def _group_lines(group: Group) -> Iterator[str]:
    """Yield the lines that explain a group and its keys."""
    if group.choices:
        chosen = f"{group.name}={group.chosen}"
        yield from table([(chosen, with_choices(group.about, group.choices))])
    elif group.name:
        # A group without choices has no line of its own to type.
        yield from table([(f"{group.name}.*", group.about)])
    yield from table(
        (f"{key.name}={key.default}", with_choices(key.about, key.choices))
        for key in group.keys
    )
