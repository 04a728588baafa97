"""A run is continued or forked by its directory alone, and a sweep is checked whole
before its first job."""

import dataclasses
import functools
import json
import logging
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from trainer.cli import train as command
from trainer.config.composition import (
    Sweep,
    choice_of_each_family,
    choices_of_groups,
    compose_config,
    expand_arguments,
)
from trainer.config.fields import from_saved, from_tree, to_tree
from trainer.config.resume import (
    COMPILE_CACHE,
    DATA_CACHE,
    CommandLine,
    default_cache,
    overlaps,
)
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.text import override


@functools.cache
def unusual():
    """Return a configuration with unusual settings."""
    c = compose_config(
        [
            *("run_dir=old", "optimizer=sgd", "precision=sim_e3m4", "model.n_layer=3"),
            *("train.steps=50", "seed=7", "tracker.name=mine", "tracker.tags=[a b,c]"),
            *("optimizer.lr=3e-8", "dry_run=true"),
        ]
    )
    sample = dataclasses.replace(c.sample, prompt="it's ${x}, a=b ")
    return dataclasses.replace(c, sample=sample)


def save(tree):
    """Write a configuration as the run `old` in the working directory has it."""
    Path("old").mkdir(exist_ok=True)
    Path("old/config.yaml").write_text(yaml.safe_dump(tree))


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """The configuration of the run `old` in the working directory, as a tree."""
    monkeypatch.chdir(tmp_path)
    tree = to_tree(unusual())
    save(tree)
    return tree


def test_a_run_goes_on_with_its_own_settings_but_those_given_anew(saved):
    c = unusual()
    expected = dataclasses.replace(
        c,
        train=dataclasses.replace(c.train, steps=80),
        resume=dataclasses.replace(c.resume, source="old"),
        dry_run=False,
    )
    overrides = ["resume=old", "train.steps=80"]
    assert compose_config(overrides) == expected
    assert compose_config([*overrides, "run_dir=./old"]) == expected


@pytest.mark.parametrize(
    ("key", "other", "expected"),
    [
        ("precision.weights", "precision.weights", True),
        ("precision", "precision.weights", True),
        ("precision.weights", "precision", True),
        ("precision.weights", "precision.weights_rounding", False),
        ("data.sources", "data.source", False),
    ],
)
def test_a_key_overlaps_with_itself_and_its_groups_not_with_longer_names(
    key, other, expected
):
    assert overlaps(key, other) == expected


def test_the_printed_configuration_has_the_saved_settings(saved, capsys):
    assert command.main(["resume=old", "train.steps=80", "--cfg", "job"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    actual = tree["train"]["steps"], tree["seed"], tree["sample"]["prompt"]
    assert actual == (80, 7, "it's ${x}, a=b ")
    assert [path.name for path in Path().rglob("*")] == ["old", "config.yaml"]


@pytest.mark.parametrize(
    "text",
    [
        "it's ${x}, a=b ",
        "end\\",
        "\\\\'",
        "\\${oc.env:SECRET}",
        "\\\\${seed}",
        "???",
        "line\nline",
        "[1,2]",
        "null",
        "",
    ],
)
def test_any_saved_text_comes_back_as_it_is(saved, monkeypatch, text):
    monkeypatch.setenv("SECRET", "leaked")
    saved["tracker"] |= {"project": text, "tags": [text]}
    save(saved)
    tracker = compose_config(["resume=old"]).tracker
    assert (tracker.project, tracker.tags) == (text, (text,))


def test_interpolations_read_saved_values_but_never_saved_interpolations(saved):
    c = compose_config(["resume=old", "train.steps=${seed}"])
    assert c.train.steps == 7
    with pytest.raises(UserError):
        # which has ${x} in it
        compose_config(["resume=old", "tracker.group=${sample.prompt}"])


@pytest.mark.parametrize(
    "line",
    [
        "hydra: {callbacks: {x: {_target_: os.system, command: touch owned}}}",
        "++hydra: {job: {env_set: {PATH: /tmp/evil}}}",
        "~seed: 1",
        "train.steps: 3",
        "3: 4",
        "experiment: fishman",
    ],
)
def test_keys_that_are_not_of_the_schema_are_refused(saved, line):
    file = Path("old/config.yaml")
    file.write_text(file.read_text() + line + "\n")
    message = r"old/config\.yaml is damaged \((unknown key|the key 3)"
    with pytest.raises(UserError, match=message):
        compose_config(["resume=old"])


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_run_without_its_settings_does_not_resume_with_the_default_ones(
    saved, is_directory
):
    file = Path("old/config.yaml")
    file.unlink()
    compose_config(["resume=old"])  # no run: refused at the start
    Path("old/checkpoints/20").mkdir(parents=True)
    if is_directory:
        file.mkdir()
    message = r"resume=old has checkpoints, but no file config\.yaml .* run_dir=old to"
    for more in ([], ["run_dir=new"], ["run_dir=old"]):
        with pytest.raises(UserError, match=message):
            compose_config(["resume=old", *more])


@pytest.mark.parametrize(
    ("group", "value", "reason"),
    [
        ("data", None, "data=null: expected a group of keys"),
        ("train", 5, "train=5: expected a group of keys"),
        ("data", {}, "'source'"),
        ("eval", {"tasks": 5}, "eval.tasks=5 is not a list"),
        ("optimizer", {"name": ["adamw"]}, "is not text"),
    ],
)
def test_groups_that_are_none_are_damage(saved, group, value, reason):
    save(saved | {group: value})
    with pytest.raises(UserError, match=rf"is damaged \(.*{re.escape(reason)}"):
        compose_config(["resume=old"])


def test_a_link_is_no_configuration_and_no_line_of_it_is_shown(saved, tmp_path):
    secret, file = tmp_path / "secret", Path("old/config.yaml")
    secret.write_text('token: "ghp_secret\nb')
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(UserError, match=r"config\.yaml is a symbolic link"):
        compose_config(["resume=old"])
    file.unlink()
    shutil.copy(secret, file)
    message = r"is damaged \(found unexpected end of stream in line 2\)"
    with pytest.raises(UserError, match=message) as refusal:
        compose_config(["resume=old"])
    assert "ghp" not in str(refusal.value)


def test_nothing_of_a_saved_configuration_reaches_hydra(saved):
    saved["optimizer"]["name"] = "sgd,lion"
    saved["seed"] = "1 hydra.job.chdir=true"
    saved["data"]["tokenizer"] = "${oc.env:HOME}"
    save(saved)
    assert expand_arguments(["resume=old"]).overrides == [
        f"model={choice_of_each_family()['gpt2']}",
        "data=embedded",
        "resume.source=old",
        "run_dir=old",
    ]


def test_caches_and_addressees_are_not_taken_from_a_run(saved):
    saved["compile_cache"] = "evil"
    saved["data"]["cache_dir"] = "old/data"
    saved["tracker"]["entity"] = "somebody"
    save(saved)
    c = compose_config(["resume=old"])
    actual = c.compile_cache, c.data.cache_dir, c.tracker.entity
    assert actual == (default_cache(COMPILE_CACHE), default_cache(DATA_CACHE), None)
    assert expand_arguments(["resume=old"]).ignored == {
        "compile_cache": "evil",
        "data.cache_dir": "old/data",
        "tracker.entity": "somebody",
    }
    c = compose_config(["resume=old", "compile_cache=mine", "data.cache_dir=here"])
    assert (c.compile_cache, c.data.cache_dir) == ("mine", "here")


def test_a_task_that_is_a_file_is_not_taken_from_a_run(saved):
    for task in ("old/evil.yaml", "../x"):
        saved["eval"]["tasks"] = ["last_word", task]
        save(saved)
        message = r"eval\.tasks names the file '.*', which may be a program"
        with pytest.raises(UserError, match=message):
            compose_config(["resume=old"])
    c = compose_config(["resume=old", "eval.tasks=[last_word]"])
    assert c.eval.tasks == ("last_word",)


SOURCES = {
    "embedded": ["data.val_fraction=0.2"],
    "python": [],
    "text": ["data.paths=[a.txt]", "data.column=body"],
    "hf": ["data.name=OWNER/NAME", "data.split=test"],
    "prepared": ["data.prepared_dir=prepared"],
    "mix": ["data.sources=[a.txt,prepared]", "data.tokenizer=byte"],
}


def test_a_run_of_every_source_of_data_goes_on_and_is_forked(saved):
    assert set(SOURCES) == set(choices_of_groups()["data"])
    for source, overrides in SOURCES.items():
        old = compose_config([f"data={source}", *overrides])
        save(to_tree(old))
        assert compose_config(["resume=old"]).data == old.data
        fork = compose_config(["resume=old", "run_dir=new", "data.prefetch=4"])
        assert fork.data == dataclasses.replace(old.data, prefetch=4)


def test_a_run_of_a_family_that_is_not_known_is_refused(saved):
    save(saved | {"model": {"name": "mine", "family": "tiny"}})
    message = "resume=old is a tiny, which is not known; valid: gpt2"
    with pytest.raises(UserError, match=message):
        compose_config(["resume=old"])


def test_a_fork_has_the_settings_too_but_not_the_name_and_groups_are_chosen_whole(
    saved,
):
    old = unusual()
    fork = ["resume=old", "resume.step=20", "run_dir=new"]
    c = compose_config([*fork, "precision=bf16", "optimizer.momentum=0.5"])
    assert (c.run_dir, c.resume.source, c.resume.step) == ("new", "old", 20)
    assert c.precision == compose_config(["precision=bf16"]).precision
    assert c.optimizer == dataclasses.replace(old.optimizer, momentum=0.5)
    assert (c.model, c.seed, c.tracker.name) == (old.model, 7, None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("resume.step=20", r"starts another run .* add run_dir=DIRECTORY"),
        ("experiment=fishman", "but resume=old takes its settings from that run"),
        ("train={steps:9}", r"with resume= give its keys one by one"),
    ],
)
def test_overrides_that_contradict_a_continued_run_are_refused(
    saved, override, message
):
    with pytest.raises(UserError, match=message):
        compose_config(["resume=old", override])


@pytest.mark.parametrize("name", ["a b", "it's", "a(1)", "a=b", "[a]", "a~", "é"])
def test_a_run_goes_on_by_the_command_that_it_prints(saved, name):
    Path("old").rename(name)
    assert compose_config(shlex.split(override("resume", name))).run_dir == name


def test_the_home_directory_is_written_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = ["run_dir=~/a", "init_from=~", "sample.prompt=~/a"]
    paths = "data.paths=[~/a, ~/b/*.txt,c~,d~/e,'~/f']"
    assert expand_arguments([*given, paths]).overrides == [
        "run_dir=/home/me/a",
        "init_from=/home/me",
        "sample.prompt=~/a",
        "data.paths=[/home/me/a, /home/me/b/*.txt,c~,d~/e,'~/f']",
    ]


@pytest.mark.parametrize("model", ["gpt2_nano", "llama_nano"])
def test_configurations_that_runs_saved_are_read_by_every_later_version(model):
    """`saved.json` has configurations as they were on 2026-11-23; it is never renewed,
    so a new key may be null."""
    tree = json.loads(Path(__file__).with_name("saved.json").read_text())[model]
    actual = from_saved(Config, tree)
    assert (actual.model.name, actual.run_dir) == (model, "old")
    assert from_saved(Config, to_tree(actual)) == actual


def test_a_key_that_did_not_exist_is_null_where_that_is_valid():
    c = compose_config([])
    tree = to_tree(c)
    assert from_tree(Config, tree) == c
    del tree["resume"]["step"], tree["init_from"]
    with pytest.raises(UserError, match="missing key"):
        from_tree(Config, tree)
    assert from_saved(Config, tree) == c
    del tree["seed"]
    with pytest.raises(UserError, match="missing key seed"):
        from_saved(Config, tree)


def sweep_of(*arguments):
    return Sweep.parse(expand_arguments(["-m", *arguments]).overrides)


def test_a_sweep_knows_its_jobs_and_the_faults_of_each():
    values = ["seed=0,1", "model.n_layer=2", "optimizer.lr=1e-3,-1", "data.paths=[]"]
    sweep = sweep_of(*values)
    assert sweep.keys == ["seed", "optimizer.lr"]
    assert [job[-2:] for job in sweep.jobs] == [
        ["seed=0", "optimizer.lr=0.001"],
        ["seed=0", "optimizer.lr=-1"],
        ["seed=1", "optimizer.lr=0.001"],
        ["seed=1", "optimizer.lr=-1"],
    ]
    nothing = CommandLine([], {})
    (problem,) = sweep.problems(nothing)
    assert problem.startswith("job 1: optimizer.lr=-1.0: expected at least 0")
    (problem,) = sweep_of("seed=0,1", "optimizer=adamw,adamm").problems(nothing)
    assert problem.startswith("job 1: ")
    assert "adamm" in problem
    (problem,) = sweep_of("data=embedded,null").problems(nothing)
    assert problem.startswith("job 1: data=null: expected one of embedded, hf, mix")


def test_a_signal_stops_the_sweep_not_one_job_of_it(tmp_path, monkeypatch):
    calls, codes = [], iter([1, 130, 0])

    def run(*_, **__):
        calls.append(1)
        return next(codes), None

    monkeypatch.chdir(tmp_path)
    # Hydra's, which would outlive this test's captured output
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr("trainer.assembly.training.run", run)
    assert command.main(["-m", "run_dir=S", "seed=0,1,2"]) == 1
    assert len(calls) == 2
    assert not (tmp_path / "S" / "2").exists()
