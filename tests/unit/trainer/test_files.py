"""Files of a directory that somebody else may have made are data, and what is written
there stays there."""

import errno
import os
import tracemalloc
from pathlib import Path

import pytest

from trainer.data.shards import read_json_or_empty
from trainer.errors import UserError
from trainer.files import (
    MAX_VALUES,
    bounded_json,
    check_no_links,
    check_regular,
    no_follow,
    own_copy,
    parse_json,
    parse_yaml,
    path_of,
    read_file,
    read_mapping,
    read_object,
    remove_partial,
    write_atomically,
)


def test_a_link_is_replaced_and_what_it_points_to_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "config.yaml").symlink_to("precious")
    write_atomically(tmp_path / "config.yaml", "new")
    assert (
        (tmp_path / "precious").read_text(),
        (tmp_path / "config.yaml").read_text(),
    ) == ("mine", "new")
    assert not (tmp_path / "config.yaml").is_symlink()


def test_a_temporary_file_of_a_new_name_and_its_directory_are_on_disk_first(
    tmp_path, monkeypatch
):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    write_atomically(tmp_path / "a", b"1")
    write_atomically(tmp_path / "a", b"2")
    first, folder, second, _ = synced
    assert first.startswith(str(tmp_path / "."))
    assert first != second
    assert folder == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(
    tmp_path, monkeypatch
):
    (tmp_path / "a").write_text("old")

    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=rf"No space left.*{tmp_path}/a"):
        write_atomically(tmp_path / "a", b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("a", "old")
    ]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    (tmp_path / ".0123456789abcdef.partial").touch()
    others = {"config.yaml", "film.partial", ".film.partial"}
    for name in others:
        (tmp_path / name).touch()
    remove_partial(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others


def test_links_and_pipes_where_a_run_writes_are_refused(tmp_path):
    for name in ("wandb", ".wandb", "mine", "numerics", "checkpoints/20"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "wandb" / "latest-run").symlink_to("x")
    (tmp_path / ".wandb" / "latest-run").symlink_to("x")
    (tmp_path / "mine" / "data").symlink_to("x")
    check_no_links(tmp_path)
    for name in ("b", "numerics/a.png", "checkpoints/20/state", ".wandb/offline-run-a"):
        (tmp_path / name).symlink_to("/etc/passwd")
        message = f"{name} is a symbolic link; .* choose another run"
        with pytest.raises(UserError, match=message):
            check_no_links(tmp_path)
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "checkpoints" / "20" / "state")
    with pytest.raises(UserError, match="20/state is no regular file"):
        check_no_links(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1]\nb: *x",
        "a: {b: 1, c: 2}\na: {b: 3}",
        "a: {b: 1, b: 1}",
        "!!python/object/apply:os.system [true]",
        "[" * 3000,
        "x: 2001-99-99",
        'a: !!int ""',
        'a: !!float "-"',
        f"a: {'1:' * 200}1.5",
        "a: !!bool foo",
        "a: !!timestamp foo",
        "\n".join(" " * i + "a:" for i in range(150)),
        "{",
        "a" * (1 << 21),
    ],
)
def test_yaml_that_is_more_than_data_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        parse_yaml(text)


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"[]", b"3: 4", b"a: {3: 4}", b"null", b"", b"a: 0x" + b"f" * 5000],
)
def test_what_is_no_mapping_of_text_is_a_value_error(tmp_path, data):
    (tmp_path / "config.yaml").write_bytes(data)
    with pytest.raises(ValueError, match=r"."):
        read_mapping(tmp_path / "config.yaml")


def test_a_pipe_or_a_device_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        for read in (read_file, read_mapping):
            with pytest.raises(UserError, match="is no regular file"):
                read(tmp_path / name)
    with pytest.raises(OSError, match="it is no regular file"):
        no_follow(tmp_path / "pipe", os.O_RDWR | os.O_CREAT)


def test_a_file_has_a_bound(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_file(tmp_path / "a", 5) == b"12345"
    with pytest.raises(UserError, match="a has more than 4 bytes"):
        read_file(tmp_path / "a", 4)


@pytest.mark.parametrize(("mode", "content"), [("ab", "mine new"), ("wb", " new")])
def test_a_file_of_several_names_is_changed_under_one_of_them(tmp_path, mode, content):
    """`cp -al RUN RUN.bak` makes such files."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "log").hardlink_to(tmp_path / "precious")
    with open(tmp_path / "log", mode, opener=own_copy) as file:
        file.write(b" new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "log").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "precious"]
    with open(tmp_path / "new", mode, opener=own_copy):
        pass
    (tmp_path / "link").symlink_to("precious")
    with pytest.raises(OSError, match="link"):
        open(tmp_path / "link", mode, opener=own_copy)  # noqa: SIM115 it raises


@pytest.mark.parametrize(
    ("hole", "stored", "is_refused"),
    [(1 << 40, 0, True), (1 << 40, 4096, True), (1 << 27, 1 << 20, False)],
)
def test_a_file_of_holes_is_refused(tmp_path, hole, stored, is_refused):
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.truncate(hole)
        file.seek(hole // 2)
        file.write(b"1" * stored)
    if not is_refused:
        return check_regular(path)
    with pytest.raises(UserError, match=f"only {stored:,} of them are stored"):
        check_regular(path)


def test_the_home_of_nobody_is_a_path_as_any_other():
    assert path_of("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")
    assert path_of("~/x") == Path.home() / "x"


@pytest.mark.parametrize(
    "text",
    ["{", b"\xff", "1" * 5000, "[" * 200_000, "[" * 200 + "]" * 200, '{"a":' * 3000],
)
def test_json_that_is_more_than_data_is_a_value_error(tmp_path, text):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
    data = text.encode() if isinstance(text, str) else text
    (tmp_path / "index.json").write_bytes(data)
    with pytest.raises(UserError, match=r"index\.json is not JSON \("):
        read_object(tmp_path / "index.json")
    assert read_json_or_empty(tmp_path / "index.json") == {}


@pytest.mark.parametrize("text", ["3", "null", '[["a", 1]]', '"x"'])
def test_json_that_is_no_object_is_empty(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert read_json_or_empty(tmp_path / "a.json") == {}


def test_json_may_be_nested_as_deep_as_a_parser_of_it_bears():
    assert parse_json("[" * 100 + "]" * 100) != []
    assert parse_json('\ufeff"é"'.encode()) == "é"
    with pytest.raises(ValueError, match="invalid continuation byte"):
        parse_json(b'"\xed\xa0\x80"')
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


TEXT = "[{,,,,"
COUNTED = {
    "in a text": (f'["{TEXT * 400}"]', True),
    "behind an escaped quote": (f'["\\"{TEXT * 400}"]', True),
    "in a text without end": (f'["{TEXT * 400}', True),
    "behind a text": (f'["\\\\",{"{}," * 400}0]', False),
    "between texts": (f"[{'"[",' * 2000}0]", False),
    "nested": ("[" * 900 + "]" * 900, False),
    "in UTF-16, behind a letter with the byte of a quote": (
        f'["\u2200",{"{}," * 400}0]'.encode("utf-16"),
        False,
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_values_of_json_are_counted_and_not_the_characters_of_its_texts(case):
    text, is_allowed = COUNTED[case]
    if is_allowed:
        assert bounded_json(text, 100) == text
        return
    with pytest.raises(ValueError, match=r"more than \d+ values in \d,\d+ characters"):
        bounded_json(text, 100)


def test_json_of_few_bytes_does_not_fill_the_memory():
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than"):
            parse_json("[" + "{}," * MAX_VALUES + "0]")
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_VALUES
    finally:
        tracemalloc.stop()
