"""Settings of the libraries for the whole process, and the compilation cache."""

import zlib

import jax
import pytest

from trainer.errors import UserError
from trainer.run import libraries
from trainer.run.libraries import remove_corrupt_entries, use_compilation_cache


@pytest.fixture
def settings():
    """Without the tests' own cache; afterwards the settings are as before."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
    )
    saved = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in saved.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("name", ["jax_enable_x64", "jax_disable_jit"])
def test_settings_of_jax_that_change_a_run_are_refused(name):
    libraries.prepare_jax()
    value = getattr(jax.config, name)
    try:
        jax.config.update(name, True)
        with pytest.raises(UserError, match=f"{name.upper()}=.*; unset it"):
            libraries.prepare_jax()
    finally:
        jax.config.update(name, value)


def test_a_cache_is_made_and_one_that_cannot_be_written_is_one_line(tmp_path, settings):
    (tmp_path / "file").touch()
    line = use_compilation_cache(f"{tmp_path}/file/cache")
    assert f"compile_cache={tmp_path}/file/cache cannot be written (Not a dir" in line
    assert "\n" not in line
    assert jax.config.jax_compilation_cache_dir is None
    assert use_compilation_cache(f"{tmp_path}/a/cache") is None
    assert jax.config.jax_compilation_cache_dir == f"{tmp_path}/a/cache"
    assert not list((tmp_path / "a" / "cache").iterdir())


def test_entries_that_a_kill_left_half_written_are_removed_and_others_read_once(
    tmp_path, monkeypatch
):
    intact = zlib.compress(bytes(range(256)) * 100)
    flipped = bytearray(intact)
    flipped[len(intact) // 2] ^= 1
    for name, data in (
        ("intact-cache", intact),
        ("empty-cache", b""),
        ("torn-cache", intact[:-3]),
        ("flipped-cache", flipped),
        ("zstd-cache", b"\x28\xb5\x2f\xfd"),
        ("torn", b""),  # is no entry
    ):
        (tmp_path / name).write_bytes(data)
    remove_corrupt_entries(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"intact-cache", "zstd-cache", "torn", "whole.json"}
    with monkeypatch.context() as patch:
        patch.setattr(libraries, "is_corrupt", lambda _: pytest.fail("read again"))
        remove_corrupt_entries(tmp_path)
    (tmp_path / "intact-cache").write_bytes(intact[:-1])
    remove_corrupt_entries(tmp_path)
    assert not (tmp_path / "intact-cache").exists()
