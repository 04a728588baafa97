"""What the libraries are told for the whole process."""

import jax
import pytest

from trainer.libraries import use_compilation_cache

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


def test_a_cache_that_cannot_be_written_is_one_line_and_no_cache(tmp_path, settings):
    (tmp_path / "file").touch()
    line = use_compilation_cache(f"{tmp_path}/file/cache")
    assert line is not None
    assert f"compile_cache={tmp_path}/file/cache cannot be written (Not a directory)" in line
    assert "\n" not in line
    assert jax.config.jax_compilation_cache_dir is None


def test_a_cache_is_made_and_left_clean(tmp_path, settings):
    assert use_compilation_cache(f"{tmp_path}/a/cache") is None
    assert jax.config.jax_compilation_cache_dir == f"{tmp_path}/a/cache"
    assert not list((tmp_path / "a" / "cache").iterdir())
    assert use_compilation_cache(None) is None
