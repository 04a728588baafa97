"""What the libraries are told for the whole process."""

import zlib
from types import SimpleNamespace

import jax
import pytest

from trainer.assembly.startup_log import describe_other_settings
from trainer.errors import UserError
from trainer.run import libraries
from trainer.run.checkpoint import Restored
from trainer.run.libraries import remove_corrupt_entries, use_compilation_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def settings():
    """Without the tests' own cache; afterwards the settings are as before."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("name", ["jax_enable_x64", "jax_disable_jit"])
def test_settings_of_jax_that_change_a_run_are_refused(name):
    libraries.check_jax_settings()
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, True)
        with pytest.raises(UserError, match=f"{name.upper()}=.*; unset it"):
            libraries.prepare_jax()
    finally:
        jax.config.update(name, before)


def test_other_settings_of_a_resumed_run_are_said(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=a --xla_cpu_enable_fast_math=true")
    c = SimpleNamespace(train=SimpleNamespace(steps=9))
    resumed = Restored(4, None, {"settings": libraries.numeric_settings()})
    assert describe_other_settings(c, resumed) == []
    assert describe_other_settings(c, Restored(4, None, {})) == []
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=b")
    with jax.default_matmul_precision("highest"):
        [line] = describe_other_settings(c, resumed)
        assert describe_other_settings(c, resumed._replace(step=9)) == []
    assert "XLA_FLAGS= (was --xla_cpu_enable_fast_math=true)" in line
    assert "JAX_DEFAULT_MATMUL_PRECISION=highest (was None)" in line


def test_a_cache_that_cannot_be_written_is_one_line_and_no_cache(tmp_path, settings):
    (tmp_path / "file").touch()
    line = use_compilation_cache(f"{tmp_path}/file/cache")
    assert line is not None
    assert (
        f"compile_cache={tmp_path}/file/cache cannot be written (Not a directory)"
        in line
    )
    assert "\n" not in line
    assert jax.config.jax_compilation_cache_dir is None


def test_a_cache_is_made_and_left_clean(tmp_path, settings):
    assert use_compilation_cache(f"{tmp_path}/a/cache") is None
    assert jax.config.jax_compilation_cache_dir == f"{tmp_path}/a/cache"
    assert not list((tmp_path / "a" / "cache").iterdir())
    assert use_compilation_cache(None) is None


def test_entries_that_a_kill_left_half_written_are_removed_and_whole_ones_read_once(
    tmp_path, monkeypatch
):
    whole = zlib.compress(bytes(range(256)) * 100)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    entries = {
        "whole": whole,
        "empty": b"",
        "torn": whole[:-3],
        "flipped": bytes(flipped),
        "zstd": b"\x28\xb5\x2f\xfd",
    }
    for name, data in entries.items():
        (tmp_path / f"{name}-cache").write_bytes(data)
    (tmp_path / "torn").write_bytes(b"")  # is no entry
    remove_corrupt_entries(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {
        "whole-cache",
        "zstd-cache",
        "torn",
        "whole.json",
    }
    monkeypatch.setattr(
        libraries, "is_corrupt", lambda entry: pytest.fail("read again")
    )
    remove_corrupt_entries(tmp_path)
    (tmp_path / "whole-cache").write_bytes(whole[:-1])
    monkeypatch.undo()
    remove_corrupt_entries(tmp_path)
    assert not (tmp_path / "whole-cache").exists()
