"""A run whose files somebody changed is not continued, exported or sampled as if it were
whole."""

import dataclasses
import gzip
import re
import shutil
from functools import partial
from pathlib import Path

import jax
import pytest
import yaml

from trainer.assembly import saved_model
from trainer.assembly.build import build_workload
from trainer.cli import evaluate, export
from trainer.cli.train import main
from trainer.config.composition import compose_config
from trainer.data.corpus import HubSource, open_corpus
from trainer.data.hf_tokenizer import save_hf
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import UserError
from trainer.files import check_no_links
from trainer.observe.trackers.wandb import choose_run_id
from trainer.report.run_records import RunRecords
from trainer.run import initial_weights
from trainer.run.checkpoint import Checkpointer
from trainer.run.initial_weights import has_tokenizer
from trainer.run.vocabulary import vocabulary_of

SAVED = Path(__file__).resolve().parents[3] / "data" / "saved_by_7ef3f38" / "fp32"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(SAVED, "run"))


@pytest.mark.parametrize("fork", [[], ["run_dir=fork"]], ids=["run", "fork"])
def test_settings_that_its_checkpoint_was_not_trained_with_are_refused(
    run_dir, capsys, fork
):
    file = run_dir / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["optimizer"]["weight_decay"] = 0.7
    file.write_text(yaml.safe_dump(tree))
    assert main([f"resume={run_dir}", "train.steps=9", *fork]) == 2
    message = capsys.readouterr().err
    assert "is not what the checkpoint was trained with" in message
    assert re.search(r"optimizer.weight_decay=0.7 \(was 0\.\d+\)", message)


def test_a_fork_does_not_take_defaults_for_settings_that_were_cut_off(run_dir, capsys):
    file = run_dir / "config.yaml"
    text = file.read_text()
    file.write_text(text[: text.index("  weight_decay:")])
    assert main([f"resume={run_dir}", "train.steps=9", "run_dir=fork"]) == 2
    message = capsys.readouterr().err
    assert re.search(r"optimizer.weight_decay is missing \(was 0\.\d+\)", message)
    assert "train.trainable is missing (was null)" in message
    assert not Path("fork/checkpoints").exists()
    # Settings that the command gives are the fork's own.
    file.write_text(text)
    change = ["optimizer.weight_decay=0.7", "train.steps=3", "run_dir=fork"]
    assert main([f"resume={run_dir}", *change]) == 0


def test_settings_that_a_run_which_has_ended_would_not_read_are_refused(
    run_dir, capsys
):
    arguments = ["train.steps=2", "train.final_eval_batches=9"]
    assert main([f"resume={run_dir}", *arguments]) == 2
    message = capsys.readouterr().err
    assert "ended after step 2, so these have no effect" in message
    assert "train.final_eval_batches=9 (was 2)" in message


def test_settings_of_a_directory_without_checkpoints_are_not_taken(run_dir, capsys):
    checkpoints = run_dir / "checkpoints"
    shutil.rmtree(checkpoints)
    assert main([f"resume={run_dir}"]) == 2
    nothing = "resume=run has no checkpoints; nothing was trained"
    assert nothing in capsys.readouterr().err
    (checkpoints / "3").mkdir(parents=True)
    (checkpoints / "3" / "_CHECKPOINT_METADATA").write_text("[1]")
    assert main([f"resume={run_dir}"]) == 2
    assert "no usable checkpoint in run_dir=run" in capsys.readouterr().err


@pytest.mark.parametrize("read", [saved_model.restore_run, vocabulary_of])
def test_another_tokenizer_than_its_checkpoint_s_is_refused(run_dir, monkeypatch, read):
    other = ByteTokenizer()
    other.fingerprint = "another"
    monkeypatch.setattr(initial_weights, "load_saved", lambda *_: other)
    read_manifest = Checkpointer.manifest

    def manifest(*args):
        actual = read_manifest(*args)
        return actual._replace(meta=actual.meta | {"tokenizer_fingerprint": "byte"})

    monkeypatch.setattr(Checkpointer, "manifest", manifest)
    with pytest.raises(UserError, match="is not that of its checkpoints"):
        read(run_dir)


def test_an_export_that_its_dtype_cannot_hold_is_refused(run_dir, monkeypatch):
    model = saved_model.restore_run(run_dir)
    large = jax.tree.map(lambda x: x * 1e7, model.params)
    monkeypatch.setattr(
        saved_model, "restore_run", lambda *_: model._replace(params=large)
    )
    arguments = export.Arguments(run_dir=str(run_dir), out="out", dtype="fp16")
    with pytest.raises(UserError, match=r"dtype=fp16: .* is not finite in it"):
        export.main(arguments)
    assert not Path("out").exists()


def test_a_tokenizer_that_cannot_be_exported_is_refused_before_the_weights(
    run_dir, monkeypatch
):
    model = saved_model.restore_run(run_dir)
    model.tokenizer.pattern = r"(?s).\n|.|\n"
    monkeypatch.setattr(saved_model, "restore_run", lambda *_: model)
    with pytest.raises(UserError, match="may read its word pattern"):
        export.main(export.Arguments(run_dir=str(run_dir), out="out"))
    assert not Path("out").exists()


def test_settings_that_cannot_be_read_are_refused_before_the_weights(
    run_dir, tmp_path, monkeypatch
):
    (tmp_path / "generation_config.json").write_text("[" * 200_000)
    monkeypatch.setattr(export, "original_directory", lambda *_: tmp_path)
    with pytest.raises(UserError, match=r"generation_config\.json is not JSON"):
        export.main(export.Arguments(run_dir=str(run_dir), out="out"))
    assert not Path("out").exists()


def test_nothing_is_prepared_where_a_saved_configuration_says(tmp_path):
    stranger, mine = tmp_path / "stranger", tmp_path / "mine"
    keys = ["data=text", "data.paths=[secret.txt]", f"data.cache_dir={stranger}"]
    c = compose_config(keys)
    data = saved_model.without_saved_cache(c, "f1", mine).data
    assert (data.source, data.cache_dir) == ("text", str(mine))
    prepared = stranger / "text-byte"
    prepared.mkdir(parents=True)
    (prepared / "manifest.json").write_text('{"fingerprint": "f1"}')
    (stranger / "odd").mkdir()
    (stranger / "odd" / "manifest.json").write_text("[" * 200_000)
    data = saved_model.without_saved_cache(c, "f1", mine).data
    assert (data.source, data.prepared_dir) == ("prepared", str(prepared))


def test_a_text_of_the_user_is_not_unpacked_inside_of_the_run(run_dir, monkeypatch):
    restore = saved_model.restore_training

    def without_cache(*args):
        c, *rest = restore(*args)
        data = dataclasses.replace(c.data, cache_dir=None)
        return dataclasses.replace(c, data=data), *rest

    monkeypatch.setattr(saved_model, "restore_training", without_cache)
    Path("private.txt.gz").write_bytes(gzip.compress(b"private notes. " * 2000))

    def files():
        return {p for p in run_dir.rglob("*") if "checkpoints" not in p.parts}

    first_files = files()
    evaluate.main(evaluate.Arguments(str(run_dir), text="private.txt.gz", batches=1))
    assert files() - first_files == {run_dir / "evaluation_of_text.json"}


def test_the_id_of_a_wandb_run_is_not_read_through_a_link(run_dir):
    Path("token").write_text("hf_SECRET")
    (run_dir / "wandb").mkdir()
    (run_dir / "wandb" / "run_id").symlink_to(Path("token").absolute())
    with pytest.raises(UserError, match="wandb/run_id is a symbolic link"):
        check_no_links(run_dir)
    assert choose_run_id(run_dir, None) != "hf_SECRET"


def test_only_the_links_that_wandb_makes_are_in_its_folder(run_dir):
    """Others would be uploaded by `wandb sync`, which a message advises."""
    part = run_dir / "wandb" / "offline-run-20260101_000000-a"
    (part / "files").mkdir(parents=True)
    (run_dir / "wandb" / "latest-run").symlink_to(part.name)
    (run_dir / "wandb" / "debug.log").symlink_to(part / "debug.log")
    (part / "logs").mkdir()
    (part / "logs" / "debug-core.log").symlink_to(Path("core.log").absolute())
    check_no_links(run_dir)
    (part / "files" / "notes.txt").symlink_to(Path("token").absolute())
    with pytest.raises(UserError, match=r"files/notes.txt is a symbolic link"):
        check_no_links(run_dir)


@pytest.mark.parametrize("name", ["init_from", "checkpoints"])
def test_no_reader_of_a_run_follows_a_link_in_it(run_dir, capsys, name):
    private = Path("private")
    if (run_dir / name).exists():
        (run_dir / name).rename(private)
    else:
        private.mkdir()
    (run_dir / name).symlink_to(private.absolute())
    refusal = f"{run_dir / name} is a symbolic link"
    assert main([f"resume={run_dir}", "run_dir=new"]) == 2
    assert refusal in capsys.readouterr().err
    assert main([f"init_from={run_dir}", "run_dir=new"]) == 2
    assert refusal in capsys.readouterr().err
    assert main([f"init_from={run_dir}", "model=from_init", "run_dir=new"]) == 2
    assert refusal in capsys.readouterr().err
    assert not Path("new").exists()
    readers = [
        partial(vocabulary_of, run_dir),
        partial(saved_model.restore_run, run_dir),
        partial(RunRecords.read, run_dir),
    ]
    for read in readers:
        with pytest.raises(UserError, match=refusal):
            read()


def test_an_export_takes_no_file_from_where_a_saved_setting_says(
    run_dir, monkeypatch, capsys
):
    model = saved_model.restore_run(run_dir)
    private = Path("private")
    private.mkdir()
    save_hf(private, model.tokenizer, model.spec.context)
    (private / "config.json").write_text("{}")
    (private / "chat_template.jinja").write_text("secret")
    (private / "generation_config.json").write_text('{"secret": 1}')
    assert has_tokenizer(private, model.tokenizer)
    c = dataclasses.replace(model.config, init_from=str(private.absolute()))
    monkeypatch.setattr(saved_model, "restore_run", lambda *_: model._replace(config=c))
    export.main(export.Arguments(run_dir=str(run_dir), out="out"))
    assert not Path("out/chat_template.jinja").exists()
    assert "secret" not in Path("out/generation_config.json").read_text()
    said = capsys.readouterr().out
    assert f"run/init_from has no tokenizer files of init_from={c.init_from}" in said


def test_no_name_of_a_column_of_a_file_that_a_saved_setting_names_is_shown(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("keys.json").write_text('{"SECRET": {"a": "v"}, "b": "c"}')
    keys = ["data=text", "data.paths=[keys.json]", "data.column=body"]
    keys += ["model=gpt2_nano", "dry_run=true", "data.tokenizer=byte"]
    with pytest.raises(UserError, match=r"valid for data\.column: SECRET, b"):
        build_workload(compose_config(keys))
    with pytest.raises(UserError, match=r"no column 'body'; set data\.column") as error:
        build_workload(compose_config([*keys, "resume=stranger"]))
    assert "SECRET" not in str(error.value)


HUB = {"source": "hf", "name": "stranger/set", "split": "train", "column": "text"}


def test_no_data_set_of_the_hub_that_a_saved_setting_names_is_fetched(
    run_dir, monkeypatch, capsys
):
    """It would be asked for with the user's token."""
    asked = []
    monkeypatch.setattr(
        "datasets.load_dataset_builder", lambda *x, **_: asked.append(x)
    )
    file = run_dir / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["data"] |= HUB
    file.write_text(yaml.safe_dump(tree))
    refusal = "data.name=stranger/set is a data set of the hub that is not prepared"
    assert main([f"resume={run_dir}", "train.steps=9"]) == 2
    assert refusal in capsys.readouterr().err
    read_manifest = Checkpointer.manifest

    def manifest(*args):
        actual = read_manifest(*args)
        return actual._replace(meta=actual.meta | {"config": tree})

    monkeypatch.setattr(Checkpointer, "manifest", manifest)
    with pytest.raises(UserError, match=refusal):
        saved_model.restore_training(run_dir)
    assert asked == []


def test_prepared_data_of_the_hub_are_found_by_saved_settings(tmp_path):
    source = HubSource("stranger/set")
    saved = dataclasses.replace(source, may_fetch=False)
    first, second = (open_corpus(x, tmp_path) for x in (source, saved))
    assert first.fingerprint == second.fingerprint
    assert first.description == second.description
