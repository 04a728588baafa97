"""Wrong keys, values, combinations: one line with what was found and what is valid,
exit code 2, nothing left."""

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pytest
import yaml
from configurations import configured
from omegaconf import OmegaConf

from trainer.__main__ import command
from trainer.assembly.build import build_model
from trainer.bounds import Positive, at_least
from trainer.cli.train import EARLY_INTERRUPT
from trainer.config.combinations import validate
from trainer.config.composition import (
    CONFIGS,
    compose_config,
    describe_wrong_key,
)
from trainer.config.fields import from_saved, from_tree, to_tree
from trainer.config.schema import MODEL_SCHEMAS, Config, schema_of
from trainer.errors import UserError
from trainer.models.registry import SPECS


def load(*arguments: str) -> Config:
    return compose_config(arguments)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command_line(tmp_path, monkeypatch, capsys):
    """The command, called in this process and in an empty directory: importing the
    trainer takes longer than most answers.
    """

    def call(*args: str) -> Done:
        monkeypatch.chdir(tmp_path)
        # Hydra's handlers would outlive this test's output.
        monkeypatch.setattr(logging.root, "handlers", [])
        # Of the whole process.
        monkeypatch.setattr(EARLY_INTERRUPT, "install", lambda: None)
        monkeypatch.setattr(sys, "argv", ["trainer", *args])
        with pytest.raises(SystemExit) as ended:
            command()
        return Done(ended.value.code, *capsys.readouterr())

    return call


def test_the_defaults_are_valid_and_survive_a_round_trip():
    config = load()
    assert from_tree(Config, to_tree(config)) == config


SIZES = ("nano", "124m", "350m", "774m", "1558m")
OPTIMIZERS = ("adamw", "lion", "adafactor", "sgd", "muon")
SCHEDULES = ("cosine", "wsd", "linear", "constant", "cosine")
OTHERS = (
    "tracker=wandb",
    "tracker=jsonl",
    "tracker=none",
    "precision=bf16",
    "model.mlp=swiglu",
)


@pytest.mark.parametrize(
    "choices", zip(SIZES, OPTIMIZERS, SCHEDULES, OTHERS, strict=True)
)
def test_every_choice_of_every_group_is_valid(choices):
    size, optimizer, schedule, other = choices
    given = [f"model=gpt2_{size}", f"optimizer={optimizer}", f"schedule={schedule}"]
    load(*given, other, "train.batch_tokens=8192")


@pytest.mark.parametrize("family", SPECS)
def test_the_defaults_of_a_family_are_the_same_in_its_yaml_and_in_its_spec(family):
    """Both are needed: Hydra takes overrides of keys that a file has, a program makes a
    spec of what it knows."""
    base = yaml.safe_load((Path(CONFIGS) / "base" / f"{family}.yaml").read_text())
    if base.pop("defaults", None):
        llama = yaml.safe_load((Path(CONFIGS) / "base" / "llama.yaml").read_text())
        base = llama | base
    assert (base.pop("family"), base.pop("vocab_size")) == (family, None)
    del base["name"], base["lr"]
    fields = dataclasses.fields(SPECS[family])
    assert base == {
        field.name: field.default
        for field in fields
        if field.default is not dataclasses.MISSING
    }


def test_the_model_of_weights_has_the_keys_of_every_family():
    tree = yaml.safe_load((Path(CONFIGS) / "model" / "from_init.yaml").read_text())
    of_families = {
        field.name for spec in SPECS.values() for field in dataclasses.fields(spec)
    }
    assert set(tree) == of_families | {"name", "lr", "family"}
    assert {key for key, value in tree.items() if value is not None} == {"name", "lr"}


@dataclasses.dataclass(frozen=True)
class TinySpec:
    """A family of which nothing else knows."""

    vocab_size: Positive
    context: Positive = 8
    depth: Annotated[int, at_least(2)] = 2
    gate: Literal["open", "shut"] = "open"


@pytest.fixture
def tiny(monkeypatch):
    """The tree of a configuration whose model is of another family."""
    monkeypatch.setitem(SPECS, "tiny", TinySpec)
    monkeypatch.setitem(MODEL_SCHEMAS, "tiny", schema_of(TinySpec))
    model = {
        "name": "mine",
        "family": "tiny",
        "lr": 1e-3,
        "vocab_size": None,
        "context": 8,
        "depth": 3,
        "gate": "shut",
    }
    return to_tree(load()) | {"model": model}


def test_a_family_is_added_by_its_spec(tiny):
    config = from_tree(Config, tiny)
    validate(config)
    assert config.model.spec(40) == TinySpec(40, 8, 3, "shut")
    assert from_saved(Config, to_tree(config)) == config
    for changes, said in (
        (
            {"n_head": 3},
            r"unknown key model\.n_head of tiny; .*Valid: context, depth, family, gate",
        ),
        ({"depth": 1}, r"model\.depth=1: expected at least 2"),
        ({"gate": "shot"}, r"model\.gate='shot' is not a choice; did you mean 'shut'"),
        ({"vocab_size": 0}, r"model\.vocab_size=0: expected at least 1"),
        (
            {"family": "tine"},
            r"model\.family='tine' is not a choice; did you mean 'tiny'",
        ),
    ):
        with pytest.raises(UserError, match=said):
            from_tree(Config, tiny | {"model": tiny["model"] | changes})
    del tiny["model"]["depth"]
    with pytest.raises(UserError, match=r"missing key model\.depth of tiny"):
        from_tree(Config, tiny)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("train.steps=abc", ["train.steps", "'abc'", "whole number"]),
        ("train.steps=0", ["train.steps=0", "at least 1"]),
        ("dry_run=3", ["dry_run=3", "true or false"]),
        ("model.mlp=gelo", ["model.mlp='gelo'", "did you mean 'gelu'"]),
        ("model.n_head=3", ["model.d_model=", "model.n_head=3"]),
        (
            "train.batch_tokens=1000",
            ["train.batch_tokens=1000", "model.context", "nearest valid"],
        ),
        (
            "train.grad_accum_steps=7",
            ["train.batch_tokens", "train.grad_accum_steps", "7"],
        ),
        ("data=text", ["data.paths", "train(config, data=TEXTS), without data="]),
        ("data.column=body", ["data.column=body", "data=text or data=hf"]),
        ("data.source=text", ["data.column is null", "data=text"]),
        ("data.paths=x", ["data.paths='x'", "list"]),
        ("profile.steps=[5,100000]", ["profile.steps", "within 1.."]),
        ("optimizer.b2=0.99999999", ["optimizer.b2=0.99999999", "[0, 1 - 2^-24]"]),
        (
            "train.final_eval_batches=15",
            ["train.final_eval_batches=15 is less", "train.eval_batches=16"],
        ),
        ("parallel.data=0", ["parallel.data=0", "-1"]),
        ("seed=4294967296", ["seed=4294967296", "4294967295"]),
        ("data.val_fraction=0", ["data.val_fraction=0", "validation"]),
        ("model.value_gain=3", ["model.value_gain=3.0", "power of two", "null"]),
        (
            "model.align_channels=2",
            ["model.align_channels=2", "model.mlp=gelu", "smooth_swiglu"],
        ),
        (
            "model.remat=dots_savable",
            ["model.remat='dots_savable'", "did you mean 'dots_saveable'"],
        ),
        ("model.family=gpt3", ["model.family='gpt3'", "did you mean 'gpt2'"]),
        ("precision.clip_outliers=0.5", ["precision.clip_outliers=0.5", "at least 1"]),
        ("precision.backward=e5m2x", ["precision.backward=e5m2x", "e4m3s"]),
        ("precision.compute=fp64", ["precision.compute='fp64'", "bf16, fp16, fp32"]),
        ("precision.forward=e4m33", ["precision.forward=e4m33", "eXmY", "e4m3"]),
        (
            "precision.weights=fp16",
            ["precision.weights=fp16", "precision.scaling=propagate"],
        ),
        ("optimizer.eps=0", ["optimizer.eps=0", "at least 2^-126"]),
        ("optimizer.lr=inf", ["optimizer.lr=inf", "a finite number"]),
        ("schedule.min_ratio=1.5", ["schedule.min_ratio=1.5", "[0, 1]"]),
        ("sample.top_p=0", ["sample.top_p=0.0", "more than 0, at most 1"]),
        ("sample.prompt=''", ["sample.prompt=", "a first word"]),
        ("watchdog.spike_window=1", ["watchdog.spike_window=1", "at least 2"]),
    ],
)
def test_bad_values_are_refused_with_what_is_valid(override, names):
    with pytest.raises(UserError) as error:
        configured(override)
    message = str(error.value)
    assert "\n" not in message
    for name in names:
        assert name in message, message


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("modle.n_layer", ["unknown key modle.n_layer", "did you mean 'model'"]),
        ("model.n_haed", ["did you mean 'n_head'"]),
        ("model.n_layer.x", ["model.n_layer has no keys"]),
        ("lr", ["unknown key lr; did you mean model.lr or optimizer.lr?"]),
        ("steps", ["did you mean train.steps or profile.steps?"]),
        ("batch", ["did you mean train.batch_tokens or eval.batch_size?"]),
        ("train.lr", ["did you mean model.lr or optimizer.lr?"]),
        ("nonsense", ["unknown key nonsense; Valid: checkpoint"]),
    ],
)
def test_a_wrong_key_names_the_nearest_valid_one(key, names):
    for name in names:
        assert name in describe_wrong_key(key, to_tree(load()))


@pytest.mark.parametrize(
    ("optimizer", "ignored"), [("lion", "eps"), ("adafactor", "b1"), ("sgd", "b2")]
)
def test_a_setting_that_the_optimizer_does_not_use_is_refused(optimizer, ignored):
    says = rf"unknown key optimizer\.{ignored} of {optimizer}; .*weight_decay"
    with pytest.raises(UserError, match=says):
        load(f"optimizer={optimizer}", f"+optimizer.{ignored}=0.5")


def test_moments_that_the_optimizer_does_not_have_are_refused_before_anything_is_built():
    with pytest.raises(
        UserError,
        match=(
            r"precision\.nu=fp16, but optimizer=lion has no such moment; set"
            r" prec.*=fp32"
        ),
    ):
        load("optimizer=lion", "precision=scalify_fp8_fp16")
    with pytest.raises(
        UserError,
        match=r"precision\.mu=fp32, but precision\.update=propagate computes in fp16",
    ):
        load("precision=scalify_fp8", "precision.update=propagate")
    load("optimizer=lion", "precision=scalify_fp8_fp16", "precision.nu=fp32")


def test_a_setting_that_the_source_does_not_use_is_refused():
    text, hf = ["data=text", "data.paths=[a]"], ["data=hf", "data.name=a/b"]
    prepared = ["data=prepared", "data.prepared_dir=x"]
    for given, refused in (
        (text, ["name=a", "config=b", "split=c", "revision=d", "streaming=true"]),
        (text, ["max_tokens=9"]),
        (hf, ["paths=[a]", "format=text", "prepared_dir=x"]),
        (prepared, ["val_fraction=0.2", "workers=2", "cache_dir=y"]),
        (prepared, ["max_documents=3"]),
    ):
        for key in refused:
            name = key.split("=")[0]
            says = rf"data\.{name}=.* is not used by {given[0]}, and would"
            with pytest.raises(UserError, match=says):
                configured(*given, f"data.{key}")


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["data.paths=[book.txt]"], ["data.paths=[book.txt]", "add data=text"]),
        (["model.n_haed=3"], ["unknown key model.n_haed", "did you mean 'n_head'"]),
        (
            ["optimizer=lion", "optimizer.eps=1"],
            ["unknown key optimizer.eps", "b1, b2, clip_norm, lr"],
        ),
        (["optimizer.name=lion"], ["unknown key optimizer.eps of lion"]),
        (["optimizer.name=adam"], ["optimizer='adam'", "did you mean 'adamw'"]),
        (["model=gpt3"], ["model/gpt3", "gpt2_124m"]),
        (["model=gpt2_124"], ["did you mean 'gpt2_124m'"]),
        (
            ["precision=scalify_fp8_f16"],
            ["did you mean 'scalify_fp8_fp16'", "sim_eXmY"],
        ),
        (["data.paths=[a (1).txt]"], ["'[a (1).'", "need quotes within quotes"]),
        (
            ["seed=1", "init_from=ck/epoch=1-step=2"],
            [
                "init_from=ck/epoch=1",
                "need quotes",
                "\"init_from='ck/epoch=1-step=2'\"",
            ],
        ),
        (["train.steps=3000000000"], ["train.steps=3000000000", "at most 100000000"]),
        (
            ["schedule=wsd", "schedule.decay_fraction=0.99"],
            ["schedule.decay_fraction=0.99", "are more than all steps", "at most 1"],
        ),
        (
            ["data=text", "data.paths=[d/*.{txt,md},a.txt]"],
            ["braces are not understood", "data.paths=[d/*.txt,d/*.md,a.txt]"],
        ),
        (
            # as bash writes [d/*.{txt,md}]
            ["data=text", "data.paths=[d/*.txt]", "data.paths=[d/*.md]"],
            [
                "data.paths=[d/*.txt] and data.paths=[d/*.md]: only the last would",
                "'data.paths=[d/*.txt,d/*.md]'",
            ],
        ),
        (
            ["train.steps=1", "++train.steps=2"],
            ["train.steps=1 and train.steps=2", "give train.steps once"],
        ),
        (
            ["model=gpt2_nano", "-m", "model=llama_nano"],
            ["model=gpt2_nano and model=llama_nano"],
        ),
        (
            ["resume=none", "resume.source=auto"],
            ["resume.source=none and resume.source=auto"],
        ),
        (["steps=3"], ["unknown key steps; did you mean train.steps"]),
        (["train.steps"], ["train.steps", "EQUAL"]),
        (["run_dir=/proc/none"], ["/proc/none", "run_dir"]),
        (["--multirun", "train.steps=0,-1"], ["train.steps=0", "train.steps=-1"]),
    ],
)
def test_the_command_line_answers_bad_input_with_one_line_and_exit_code_2(
    args, names, tmp_path, command_line
):
    done = command_line(*args)
    assert done.returncode == 2, done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())
    for name in names:
        assert name in done.stderr
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name != "multirun.yaml"
    ]


def test_a_key_given_twice_alike_and_flags_are_let_through(command_line):
    done = command_line("seed=3", "-c", "job", "seed=3", "--resolve")
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["seed"] == 3


@pytest.mark.parametrize(("tracker", "times"), [("none", 1), ("jsonl", 0)])
def test_a_sweep_without_logs_says_once_and_first_that_it_names_no_best(
    tracker, times, command_line
):
    absent = ["data=text", "data.paths=[none.txt]", "data.tokenizer=byte"]
    done = command_line(
        "--multirun",
        "seed=0,1",
        f"tracker={tracker}",
        "run_dir=S",
        *absent,
    )
    assert done.stderr.count("there is no file none.txt") == 2
    assert done.stdout.count("the sweep cannot name a best; add tracker=jsonl") == times


def test_cfg_job_prints_the_resolved_config_and_resume_has_a_short_form(command_line):
    done = command_line("--cfg", "job", "resume=none", "model=gpt2_124m", "run_dir=a")
    tree = OmegaConf.create(done.stdout)
    assert (tree.resume.source, tree.model.d_model, tree.run_dir) == ("none", 768, "a")


def test_a_simulated_format_has_a_short_form():
    for form in ("e3m4", "e3m4t", "e3m4s"):
        p = load(f"precision=sim_{form}").precision
        assert (p.name, p.simulate) == (f"sim_{form}", True)
        assert (p.forward, p.backward) == (form, form)
    other = load("precision=sim_e3m4", "precision.backward=e4m3").precision
    assert other.backward == "e4m3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2_nano", "model.vocab_size=100 is smaller than the tokenizer's 256 ids;"),
        ("from_init", "100, the vocabulary of the weights, is smaller than the"),
    ],
)
def test_a_vocabulary_that_is_too_small_says_whose_it_is(name, message):
    c = compose_config(["model=gpt2_nano", "model.vocab_size=100"])
    model = dataclasses.replace(c.model, name=name)
    with pytest.raises(UserError, match=message):
        build_model(model, c.precision.policy, 256)


@pytest.mark.parametrize("name", ["123", "2.5", "1e3", "1_000", "true", "nan", "-1"])
def test_a_name_that_reads_as_a_number_is_a_name(name):
    c = load(f"init_from={name}", f"run_dir={name}", f"data.tokenizer={name}")
    assert (c.init_from, c.run_dir, c.data.tokenizer) == (name, name, name)
    data = load("data=mix", f"data.sources=[{name},web.jsonl]").data
    assert data.sources == (name, "web.jsonl")


def test_a_number_in_a_file_names_the_weights(tmp_path):
    (tmp_path / "my.yaml").write_text("init_from: 123\n")
    with pytest.raises(UserError, match=r"init_from=123 has neither a config\.yaml"):
        compose_config([f"config={tmp_path / 'my.yaml'}", "model=from_init"])
