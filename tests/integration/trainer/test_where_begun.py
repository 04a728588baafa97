"""A run's data: found from another directory than the one that it was begun in, and
what its sources are called."""

import shutil

import numpy as np

from trainer.assembly.data import at_start_directory, build_data, source_names
from trainer.config.composition import compose_config

TOKENIZER = """{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "cat": 1, "sat": 2, "</s>": 3},
"unk_token": "[UNK]"}, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [{"id": 3, "content": "</s>",
"special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}]}"""


def test_the_data_of_a_run_are_found_from_elsewhere_and_without_the_files_of_its_tokenizer(
    tmp_path, monkeypatch
):
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    run_dir = begun / "runs/a"
    for folder in (begun / "tokenizers", begun / "books", run_dir, elsewhere):
        folder.mkdir(parents=True)
    (begun / "tokenizers/tokenizer.json").write_text(TOKENIZER)
    (begun / "books/a.txt").write_text("cat sat " * 3000)
    monkeypatch.chdir(begun)
    keys = ["data=mix", "data.sources=[books/]", "data.tokenizer=tokenizers"]
    keys += ["run_dir=runs/a", "train.batch_tokens=256", "compile_cache=null"]
    c = compose_config(keys)
    data = build_data(c)
    tokens = np.array(data.train.batch(0).tokens)
    data.tokenizer.save(run_dir)
    monkeypatch.chdir(elsewhere)
    # nobody knows where a directory of another name was begun
    with at_start_directory(c, elsewhere) as actual:
        assert actual == c
    for _ in range(2):  # the second time without the files that the configuration names
        with at_start_directory(c, run_dir) as actual:
            rebuilt = build_data(actual)
        assert rebuilt.manifest.fingerprint == data.manifest.fingerprint
        np.testing.assert_array_equal(rebuilt.train.batch(0).tokens, tokens)
        shutil.rmtree(begun / "tokenizers", ignore_errors=True)
    assert list(elsewhere.iterdir()) == []


def test_a_source_is_called_by_the_end_of_its_path_however_that_is_given(
    tmp_path, monkeypatch
):
    (tmp_path / "web").mkdir()
    (tmp_path / "web/code.jsonl").symlink_to(tmp_path / "other.jsonl")
    monkeypatch.chdir(tmp_path / "web")
    assert source_names([".", "code.jsonl", "../books/"]) == ["web", "code", "books"]
    versions = ["en-v1.0", "en-v1.1"]
    for name in versions:
        (tmp_path / "web" / name).mkdir()
    assert source_names(versions) == versions
