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

from trainer.assembly.saved_model import restore_run
from trainer.cli import train as command
from trainer.config.composition import (
    Sweep,
    choice_of_each_family,
    choices_of_groups,
    compose_config,
    expand_arguments,
)
from trainer.config.continuing import (
    COMPILE_CACHE,
    DATA_CACHE,
    continue_run,
    default_cache,
)
from trainer.config.fields import from_saved, from_tree, to_tree
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.models.registry import SPECS
from trainer.text import override


@functools.cache
def unusual():
    """A configuration with unusual settings."""
    given = [
        "run_dir=old",
        "optimizer=sgd",
        "precision=sim_e3m4",
        "model.n_layer=3",
        "train.steps=50",
        "seed=7",
    ]
    given += [
        "tracker.name=mine",
        "tracker.tags=[a b,c]",
        "optimizer.lr=3e-8",
        "dry_run=true",
    ]
    c = compose_config(given)
    return dataclasses.replace(
        c, sample=dataclasses.replace(c.sample, prompt="it's ${x}, a=b ")
    )


def save(tree):
    """Write a configuration as the run `old` in the working directory has it."""
    Path("old").mkdir(exist_ok=True)
    Path("old/config.yaml").write_text(yaml.safe_dump(tree))


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A directory of a run with unusual settings, `old`."""
    monkeypatch.chdir(tmp_path)
    c = unusual()
    save(to_tree(c))
    return c


ODD = [
    "it's ${x}, a=b ",
    "back\\slash",
    "end\\",
    "\\\\'",
    "\\${oc.env:SECRET}",
    "\\\\${seed}",
    "???",
    "line\nline",
    "[1,2]",
    "null",
    "",
]


@pytest.mark.parametrize("text", ODD)
def test_any_saved_text_comes_back_as_it_is(run_dir, monkeypatch, text):
    monkeypatch.setenv("SECRET", "leaked")
    tree = to_tree(run_dir)
    tree["tracker"] |= {"project": text, "tags": [text]}
    save(tree)
    tracker = compose_config(["resume=old"]).tracker
    assert (tracker.project, tracker.tags) == (text, (text,))


def test_interpolations_of_the_command_line_read_saved_values_but_never_saved_interpolations(
    run_dir,
):
    assert compose_config(["resume=old", "train.steps=${seed}"]).train.steps == 7
    assert (
        compose_config(["resume=old", "tracker.group=${tracker.name}"]).tracker.group
        == "mine"
    )
    with pytest.raises(UserError):
        # which has ${x} in it
        compose_config(["resume=old", "tracker.group=${sample.prompt}"])


HOSTILE = [
    "++hydra: {job: {env_set: {PATH: /tmp/evil}}}",
    "hydra: {callbacks: {x: {_target_: os.system, command: touch owned}}}",
    "+hydra/job_logging: default",
    "~seed: 1",
    "train.steps: 3",
    "3: 4",
    "experiment: fishman",
]


@pytest.mark.parametrize("line", HOSTILE)
def test_keys_that_are_not_of_the_schema_are_refused(run_dir, tmp_path, line):
    file = tmp_path / "old" / "config.yaml"
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(
        UserError, match=r"old/config\.yaml is damaged \((unknown key|the key 3)"
    ):
        compose_config(["resume=old"])


@pytest.mark.parametrize(
    ("group", "value", "reason"),
    [
        ("data", None, "data=None: expected a group of keys"),
        ("train", 5, "train=5: expected a group of keys"),
        ("data", {}, "'source'"),
        ("eval", {"tasks": 5}, "eval.tasks=5 is no list"),
        ("optimizer", {"name": ["adamw"]}, "is no text"),
    ],
)
def test_groups_that_are_none_are_damage(run_dir, group, value, reason):
    save(to_tree(run_dir) | {group: value})
    with pytest.raises(UserError, match=r"is damaged \(") as raised:
        compose_config(["resume=old"])
    assert reason in str(raised.value)


@pytest.mark.parametrize("words", ["train=5", "train=null", "model=[1]"])
def test_groups_that_are_none_are_refused_on_the_command_line(words):
    with pytest.raises(UserError):
        compose_config([words])


def test_groups_that_are_none_are_refused_in_a_file(tmp_path):
    for text in ("train:\n", "train: 5\n", "optimizer: {name: [adamw]}\n"):
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        with pytest.raises(UserError):
            compose_config([f"config={file}"])


def test_nothing_of_a_saved_configuration_reaches_hydra(run_dir):
    tree = to_tree(run_dir)
    tree["optimizer"]["name"] = "sgd,lion"
    tree["seed"] = "1 hydra.job.chdir=true"
    tree["data"]["tokenizer"] = "${oc.env:HOME}"
    save(tree)
    choices = choice_of_each_family()
    assert expand_arguments(["resume=old"]).overrides == [
        f"model={choices['gpt2']}",
        "data=embedded",
        "resume.source=old",
        "run_dir=old",
    ]


def test_caches_and_addressees_are_not_taken_from_a_run(run_dir, tmp_path):
    tree = to_tree(run_dir) | {"compile_cache": "evil"}
    tree["data"]["cache_dir"] = "old/data"
    tree["tracker"]["entity"] = "somebody"
    file = tmp_path / "old" / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    c = compose_config(["resume=old"])
    assert (c.compile_cache, c.data.cache_dir) == (
        default_cache(COMPILE_CACHE),
        default_cache(DATA_CACHE),
    )
    assert expand_arguments(["resume=old"]).not_trusted == {
        "compile_cache": "evil",
        "data.cache_dir": "old/data",
        "tracker.entity": "somebody",
    }
    assert c.tracker.entity is None
    c = compose_config(["resume=old", "compile_cache=mine", "data.cache_dir=here"])
    assert (c.compile_cache, c.data.cache_dir) == ("mine", "here")
    file.write_text(yaml.safe_dump(tree | {"compile_cache": None}))
    assert compose_config(["resume=old"]).compile_cache is None


@pytest.mark.parametrize("task", ["old/evil.yaml", "evil.yaml", "../x"])
def test_a_task_that_is_a_file_is_not_taken_from_a_run(run_dir, task):
    tree = to_tree(run_dir)
    tree["eval"]["tasks"] = ["last_word", task]
    save(tree)
    with pytest.raises(
        UserError, match=r"eval\.tasks names the file '.*', which may be a program"
    ):
        compose_config(["resume=old"])
    assert compose_config(["resume=old", "eval.tasks=[last_word]"]).eval.tasks == (
        "last_word",
    )
    tree["eval"]["tasks"] = ["last_word", "hellaswag"]
    save(tree)
    assert compose_config(["resume=old"]).eval.tasks == ("last_word", "hellaswag")


def test_a_link_is_no_configuration_and_no_line_of_it_is_shown(run_dir, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('token: "ghp_secret\nb')
    file = tmp_path / "old" / "config.yaml"
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(UserError, match=r"config\.yaml is a symbolic link"):
        compose_config(["resume=old"])
    file.unlink()
    shutil.copy(secret, file)
    with pytest.raises(
        UserError, match=r"is damaged \(found unexpected end of stream in line 2\)"
    ) as error:
        compose_config(["resume=old"])
    assert "ghp" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "prints"),
    [
        (["--cfg", "job"], True),
        (["-c", "job"], True),
        (["--cfg=job"], True),
        (["-cjob"], True),
        (["--cfg", "all"], True),
        (["sample.prompt='x -c job y'"], False),
        (["--cfg", "hydra"], False),
    ],
)
def test_what_asks_for_the_configuration(words, prints):
    assert command.prints_configuration(["resume=old", *words, "seed=1"]) == prints


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "a: &a [1]\nb: *a",
        "[" * 5000,
        "seed: 2001-99-99",
        "seed: " + "9" * 5000,
        "\x00",
        "model: {}\ndata: {}\noptimizer: 3",
        "a: 1" * 300_000,
    ],
)
def test_a_malformed_configuration_is_one_line(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text(text)
    message = r"old/config\.yaml (is damaged .*; give all settings|has more than 262,144 bytes)"
    with pytest.raises(UserError, match=message) as error:
        compose_config(["resume=old"])
    assert "\n" not in str(error.value)


def test_the_printed_configuration_has_the_saved_settings(run_dir, capsys):
    assert command.main(["resume=old", "train.steps=80", "--cfg", "job"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert (tree["train"]["steps"], tree["seed"], tree["sample"]["prompt"]) == (
        80,
        7,
        "it's ${x}, a=b ",
    )


def test_a_run_goes_on_with_its_own_settings_but_those_given_anew(run_dir):
    actual = compose_config(["resume=old", "train.steps=80"])
    assert actual == dataclasses.replace(
        run_dir,
        train=dataclasses.replace(run_dir.train, steps=80),
        run_dir="old",
        resume=dataclasses.replace(run_dir.resume, source="old"),
        dry_run=False,
    )
    assert compose_config(["resume=old", "train.steps=80", "run_dir=./old"]) == actual


SOURCES = {
    "embedded": ["data.val_fraction=0.2"],
    "python": [],
    "text": ["data.paths=[a.txt]", "data.column=body"],
    "hf": ["data.name=OWNER/NAME", "data.split=test"],
    "prepared": ["data.prepared_dir=prepared"],
    "mix": ["data.sources=[a.txt,prepared]", "data.tokenizer=byte"],
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_of_every_source_of_data_goes_on_and_is_forked(
    tmp_path, monkeypatch, source
):
    monkeypatch.chdir(tmp_path)
    saved = compose_config([f"data={source}", *SOURCES[source]])
    save(to_tree(saved))
    assert compose_config(["resume=old"]).data == saved.data
    changed = compose_config(["resume=old", "run_dir=new", "data.prefetch=4"])
    assert changed.data == dataclasses.replace(saved.data, prefetch=4)


def test_every_source_of_data_has_a_choice_and_a_test():
    assert set(SOURCES) == set(choices_of_groups()["data"])


def test_a_run_goes_on_with_the_keys_of_its_family(run_dir):
    tree = to_tree(run_dir)
    tree["model"] = {"name": "mine", "family": "tiny", "depth": 3}
    save(tree)
    groups = {
        "model": ["tiny_1m", "gpt2_nano"],
        "optimizer": ["sgd"],
        "data": ["embedded"],
    }
    taken = continue_run(
        ["resume.source=old"],
        groups,
        {"tiny": "tiny_1m", "gpt2": "gpt2_nano"},
        is_sweep=False,
    )
    assert taken.overrides[:2] == ["model=tiny_1m", "optimizer=sgd"]
    of_model = {
        key: value for key, value in taken.saved.items() if key.startswith("model")
    }
    assert of_model == {"model.depth": 3, "model.family": "tiny", "model.name": "mine"}
    anew = continue_run(
        ["resume.source=old", "run_dir=b", "model=gpt2_nano"],
        groups,
        {"tiny": "x"},
        is_sweep=False,
    )
    assert [
        argument for argument in anew.overrides if argument.startswith("model")
    ] == ["model=gpt2_nano"]
    assert not any(key.startswith("model") for key in anew.saved)
    with pytest.raises(
        UserError, match="resume=old is a tiny, which is not known; Valid: gpt2"
    ):
        compose_config(["resume=old"])


def test_every_family_has_a_choice_whose_keys_are_its_own():
    for family, choice in choice_of_each_family().items():
        assert (
            compose_config([f"model={choice}", "train.batch_tokens=8192"]).model.family
            == family
        )
    assert set(choice_of_each_family()) == set(SPECS)


def test_a_fork_has_the_settings_too_but_not_the_name_and_groups_are_chosen_whole(
    run_dir,
):
    actual = compose_config(
        [
            "resume=old",
            "resume.step=20",
            "run_dir=new",
            "precision=bf16",
            "optimizer.momentum=0.5",
        ]
    )
    assert (actual.run_dir, actual.resume.source, actual.resume.step) == (
        "new",
        "old",
        20,
    )
    assert actual.precision == compose_config(["precision=bf16"]).precision
    assert actual.optimizer == dataclasses.replace(run_dir.optimizer, momentum=0.5)
    assert (actual.model, actual.seed, actual.tracker.name) == (run_dir.model, 7, None)
    assert (
        compose_config(["resume=old", "run_dir=new", "optimizer=lion"]).optimizer.name
        == "lion"
    )


def test_what_cannot_be_meant_is_refused(run_dir):
    with pytest.raises(
        UserError, match=r"resume\.step=20 starts another run .* add run_dir=DIRECTORY"
    ):
        compose_config(["resume=old", "resume.step=20"])
    with pytest.raises(
        UserError,
        match="experiment=fishman, but resume=old takes its settings from that run",
    ):
        compose_config(["resume=old", "experiment=fishman"])
    with pytest.raises(
        UserError, match=r"train=\{steps:9\}: beside resume= give its keys one by one"
    ):
        compose_config(["resume=old", "train={steps:9}"])


@pytest.mark.parametrize(
    "name", ["a b", "it's", "a(1)", "a=b", "a,b", "[a]", "a~", "é"]
)
def test_a_run_goes_on_by_the_command_that_it_prints(run_dir, name):
    Path("old").rename(name)
    assert compose_config(shlex.split(override("resume", name))).run_dir == name


def test_what_is_no_run_is_left_to_who_restores_it():
    for source in ("auto", "none", "nowhere"):
        assert expand_arguments([f"resume={source}", "seed=1"]) == (
            [f"resume.source={source}", "seed=1"],
            {},
            {},
        )


def test_the_home_directory_is_written_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = [
        "run_dir=~/a",
        "init_from=~",
        "sample.prompt=~/a",
        "data.paths=[~/a, ~/b/*.txt,c~,d~/e,'~/f']",
    ]
    assert expand_arguments(given).overrides == [
        "run_dir=/home/me/a",
        "init_from=/home/me",
        "sample.prompt=~/a",
        "data.paths=[/home/me/a, /home/me/b/*.txt,c~,d~/e,'~/f']",
    ]
    assert compose_config(["data=text", "data.paths=[~/a,b]"]).data.paths == (
        "/home/me/a",
        "b",
    )


@pytest.mark.parametrize("model", ["gpt2_nano", "llama_nano"])
def test_what_runs_saved_is_read_by_every_later_version(model):
    """`saved.json` has configurations as they were on 2026-11-23; it is never renewed,
    so a new key may be null."""
    tree = json.loads(Path(__file__).with_name("saved.json").read_text())[model]
    actual = from_saved(Config, tree)
    assert (actual.model.name, actual.run_dir) == (model, "old")
    assert from_saved(Config, to_tree(actual)) == actual


def test_what_was_saved_before_a_key_existed_is_read_with_null_where_that_is_valid():
    tree = to_tree(compose_config([]))
    del tree["resume"]["step"], tree["init_from"]
    with pytest.raises(UserError, match="missing key"):
        from_tree(Config, tree)
    assert from_saved(Config, tree) == compose_config([f"run_dir={tree['run_dir']}"])
    del tree["seed"]
    with pytest.raises(UserError, match="missing key seed"):
        from_saved(Config, tree)
    assert restore_run  # which reads what was saved


def test_flags_may_stand_anywhere():
    given = ["seed=0,1", "--multirun", "train.steps=3"]
    assert expand_arguments(given).overrides == [
        "--multirun",
        "seed=0,1",
        "train.steps=3",
    ]
    assert expand_arguments(["seed=1", "--cfg", "job"]).overrides == [
        "--cfg",
        "job",
        "seed=1",
    ]


def test_a_sweep_knows_its_jobs_and_what_is_wrong_with_any_of_them():
    words = [
        "-m",
        "seed=0,1",
        "model.n_layer=2",
        "optimizer.lr=1e-3,-1",
        "data.paths=[]",
    ]
    sweep = Sweep.parse(expand_arguments(words).overrides)
    assert sweep.keys == ["seed", "optimizer.lr"]
    assert [job[-2:] for job in sweep.jobs] == [
        [f"seed={seed}", f"optimizer.lr={lr}"]
        for seed in (0, 1)
        for lr in ("0.001", "-1")
    ]
    (complaint,) = sweep.problems({})
    assert re.match(
        r"job 1: optimizer\.lr=-1\.0: expected at least 0; no job was started",
        complaint,
    )
    (unknown,) = Sweep.parse(
        expand_arguments(["-m", "seed=0,1", "optimizer=adamw,adamm"]).overrides
    ).problems({})
    assert unknown.startswith("job 1: ")
    assert "adamm" in unknown
    # which need not be here to be build_config
    slurm = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=9"]
    assert Sweep.parse(["-m", *slurm, "seed=0,1"]).problems({}) == []
    assert Sweep.parse(["seed=0"]) == ([], [])
    assert Sweep.parse(["-m", "seed=0"]) == ([], [])


def test_a_signal_stops_the_sweep_not_one_job_of_it(tmp_path, monkeypatch):
    ran, codes = [], iter([1, 130, 0])
    monkeypatch.chdir(tmp_path)
    # Hydra's, which would outlive this test's captured output
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(
        "trainer.assembly.run.run",
        lambda *_, **__: (ran.append(1) or next(codes), None),
    )
    assert command.main(["-m", "run_dir=S", "seed=0,1,2"]) == 1
    assert len(ran) == 2
    assert not (tmp_path / "S" / "2").exists()
