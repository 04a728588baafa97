"""`data=python`: the installed library as documents, the same every time, and told by
the manifest."""

import errno
import os
import platform
import sys
import sysconfig
from pathlib import Path

import pytest
from corpora import check_positions, prepared, write

from trainer.data import StandardLibrarySource, corpus
from trainer.data.standard_library import find_library
from trainer.errors import UserError
from trainer.report.messages import text_of


@pytest.fixture
def library(tmp_path):
    texts = {
        "zlib.py": b"import a\r\n",
        "json/__init__.py": b"# json\n",
        "json.py": b"\xef\xbb\xbfx = 1\n",
        "bad.py": b"\xff\xfe",
        "nul.py": b"a\0b",
        "empty.py": b"",
        "_sysconfigdata__linux.py": b"prefix = '/home/somebody'\n",
        "site-packages/other.py": b"not ours\n",
        "ensurepip/_bundled/pip.py": b"not ours\n",
        "notes.txt": b"not Python\n",
    }
    return write(tmp_path / "lib", texts)


def test_its_files_come_by_path_without_packages_and_what_the_build_decides(library):
    actual = find_library(library)
    assert [p.relative_to(library).as_posix() for p in actual.paths] == [
        "empty.py",
        "json.py",
        "json/__init__.py",
        "zlib.py",
    ]
    assert (actual.left_out, actual.bytes) == (2, len("x = 1\n# json\nimport a\n"))
    read = [
        text for rows in corpus.python_corpus(actual).read(None) for text in rows.texts
    ]
    assert read == ["", "x = 1\n", "# json\n", "import a\n"]


def test_its_digest_is_that_of_names_and_texts_and_of_no_place(library, tmp_path):
    library_in_place = find_library(library)
    moved = library.rename(tmp_path / "elsewhere")
    assert find_library(moved).digest == library_in_place.digest
    (moved / "json.py").rename(moved / "toml.py")
    assert find_library(moved).digest != library_in_place.digest


def test_reading_goes_on_from_every_position(monkeypatch, library):
    monkeypatch.setattr(corpus, "FILES_PER_READ", 1)
    opened = corpus.python_corpus(find_library(library))
    assert len(check_positions(opened)) == 4


@pytest.mark.parametrize("function", ["read_bytes", "scandir"])
def test_a_part_that_cannot_be_read_is_not_left_out(monkeypatch, library, function):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    owner = Path if function == "read_bytes" else os
    (library / "dangling.py").symlink_to("nowhere")  # as Debian's sitecustomize.py
    find_library(library)
    monkeypatch.setattr(owner, function, fail)
    with pytest.raises(UserError, match=r"lib.* cannot be read \(Input/output error\)"):
        find_library(library)


def test_a_library_that_is_upgraded_while_it_is_read_is_refused(
    monkeypatch, library, tmp_path
):
    opened = corpus.python_corpus(find_library(library))
    (library / "zlib.py").write_text("import b\n" * 9)
    monkeypatch.setattr(corpus, "python_corpus", lambda _: opened)
    monkeypatch.setattr(corpus, "find_library", lambda: None)
    with pytest.raises(
        UserError, match=r"zlib\.py changed while it was read; run again"
    ):
        prepared(StandardLibrarySource(), tmp_path / "data")


def test_without_source_it_says_so_in_a_line(tmp_path):
    with pytest.raises(UserError, match=r"^.*has no source of its standard library.*$"):
        find_library(tmp_path)


def test_the_installed_library_is_prepared_and_told_by_its_manifest(
    monkeypatch, tmp_path
):
    folder = Path(sysconfig.get_path("stdlib"))
    few = [folder / name for name in ("abc.py", "argparse.py", "ast.py")]
    monkeypatch.setattr("trainer.data.standard_library.files_below", lambda _: few)
    manifest = prepared(StandardLibrarySource(), tmp_path / "data")
    source, version = manifest.source, platform.python_version()
    assert (source["kind"], source["version"]) == ("python", version)
    assert f"Python {version} (3 files," in text_of(source)
    assert len(source["digest"]) == 32
    assert not any(str(value).startswith(sys.base_prefix) for value in source.values())
    size = sum(path.stat().st_size for path in few)
    n_tokens = sum(manifest.token_count(split) for split in ("train", "val"))
    ends = 4  # one of three documents is cut, for the validation
    assert size == source["bytes"] == n_tokens - ends
