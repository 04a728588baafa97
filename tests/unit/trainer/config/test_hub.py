"""Ids of the Hugging Face hub in place of paths."""

from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from trainer.config.composition import compose_config
from trainer.config.fields import to_tree
from trainer.errors import UserError


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    requests = []

    def download(name, revision=None, allow_patterns=()):
        requests.append((name, revision))
        if name == "no/network":
            raise LocalEntryNotFoundError("x")
        if name == "no/model":
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return requests


def test_an_id_is_fetched_and_a_path_is_not(hub, tmp_path):
    config = compose_config(["init_from=owner/model-1.5B@refs/pr/7"])
    assert config.init_from == str(tmp_path / "cache")
    assert hub == [("owner/model-1.5B", "refs/pr/7")]
    (tmp_path / "runs").mkdir()
    for path in ("runs/mistyped", "./owner/model", "/owner/model", "mine"):
        assert compose_config([f"init_from={path}"]).init_from.endswith(path)
    assert len(hub) == 1


def test_an_id_in_a_users_file_is_fetched_and_one_in_a_saved_run_is_not(hub, tmp_path):
    """A stranger's run directory must not cause a download."""
    settings = {"init_from": "owner/model", "data": {"tokenizer": "owner/words"}}
    Path("my.yaml").write_text(yaml.safe_dump(settings))
    saved = to_tree(compose_config([]))
    assert hub == []
    config = compose_config(["config=my.yaml"])
    cache = str(tmp_path / "cache")
    assert (config.init_from, config.data.tokenizer) == (cache, cache)
    assert hub == [("owner/model", None), ("owner/words", None)]
    saved["init_from"] = "owner/model"
    saved["data"]["tokenizer"] = "owner/words"
    Path("old").mkdir()
    Path("old/config.yaml").write_text(yaml.safe_dump(saved))
    for run_dir in ("old", "fork"):
        config = compose_config(["resume=old", f"run_dir={run_dir}"])
        assert config.init_from == "owner/model"
        assert config.data.tokenizer == "owner/words"
    assert len(hub) == 2
    compose_config(["resume=old", "run_dir=fork", "init_from=owner/model"])
    assert len(hub) == 3  # the user names it


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/network", r"hub cannot be reached \(Local.*`hf download no/network`"),
        ("no/model", "is not a path here, and the hub has no such repository"),
    ],
)
def test_an_id_that_cannot_be_fetched_is_a_line(hub, name, message):
    with pytest.raises(UserError, match=message):
        compose_config([f"init_from={name}"])
