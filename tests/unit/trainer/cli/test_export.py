"""An export goes to a directory of its own."""

import json

from trainer.cli.commands import run
from trainer.cli.export import limit_lengths, tokenizer_class


def test_a_directory_with_other_files_and_a_file_are_refused(tmp_path, capsys):
    (tmp_path / ".git").mkdir()
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    for out, reason in (
        (tmp_path, "is not empty (model.safetensors), and"),
        (file, "is not a directory; choose another"),
    ):
        assert run("export", ["run_dir=nowhere", f"out={out}"]) == 2
        assert f"out={out} {reason}" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_the_tokenizer_is_loaded_as_its_file_says(tmp_path):
    """AutoTokenizer gives one beside a Qwen2 the word pattern of Qwen2."""
    assert tokenizer_class(tmp_path) == "AutoTokenizer"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_class(tmp_path) == "PreTrainedTokenizerFast"


def test_lengths_of_the_original_are_at_most_the_context(tmp_path):
    lengths = {
        "tokenizer_config": "model_max_length",
        "generation_config": "max_length",
    }
    for file, key in lengths.items():
        (tmp_path / f"{file}.json").write_text(json.dumps({key: 64, "other": 70}))
    limit_lengths(tmp_path, 32)
    for file, key in lengths.items():
        tree = json.loads((tmp_path / f"{file}.json").read_text())
        assert tree == {key: 32, "other": 70}
