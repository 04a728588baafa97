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

from trainer.__main__ import command
from trainer.assembly.build import build_model
from trainer.bounds import Positive, at_least
from trainer.cli.train import EARLY_INTERRUPT
from trainer.config.combinations import validate
from trainer.config.composition import CONFIGS, compose_config, describe_wrong_key
from trainer.config.fields import from_saved, from_tree, to_tree
from trainer.config.schema import MODEL_SCHEMAS, Config, schema_of
from trainer.errors import UserError
from trainer.models.registry import SPECS


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


def test_a_key_counts_before_and_behind_a_short_form_that_sets_it():
    keys = ["precision=sim_e3m4", "precision.forward=e5m2"]
    for arguments in (keys, keys[::-1]):
        precision = compose_config(arguments).precision
        assert (precision.name, precision.forward) == ("sim_e3m4", "e5m2")
        assert precision.backward == "e3m4"


@pytest.mark.parametrize(
    "keys",
    [
        ["train.steps=6", "train={steps:5,batch_tokens:256}"],
        ["+train={steps:5}", "train.steps=6"],
        ["train.steps=6", "train.steps=5"],
    ],
)
def test_a_key_of_two_values_is_refused(command_line, keys):
    done = command_line(*keys, "--cfg", "job")
    assert done.returncode == 2
    assert "only the last would count" in done.stderr


def test_three_values_of_a_key_are_shown_and_of_more_the_first_and_the_last(
    command_line,
):
    keys = [f"train.steps={n}" for n in (6, 5, 4, 3)]
    shown = "train.steps=6 and train.steps=5 and train.steps=4: only the last"
    assert shown in command_line(*keys[:3], "--cfg", "job").stderr
    shown = "train.steps=6 and ... and train.steps=3: only the last"
    assert shown in command_line(*keys, "--cfg", "job").stderr


@pytest.mark.parametrize("key", ["seed", "train.steps", "resume.step", "optimizer.lr"])
def test_a_number_of_thousands_of_digits_is_refused_in_a_line(key):
    with pytest.raises(UserError, match=rf"^{key}: expected a number of at most 64"):
        compose_config([f"{key}={'9' * 5000}"])


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
    model = {"name": "mine", "family": "tiny", "lr": 1e-3, "vocab_size": None}
    model |= {"context": 8, "depth": 3, "gate": "shut"}
    return to_tree(compose_config([])) | {"model": model}


def test_a_family_is_added_by_its_spec(tiny):
    config = from_tree(Config, tiny)
    validate(config)
    assert config.model.spec(40) == TinySpec(40, 8, 3, "shut")
    assert from_saved(Config, to_tree(config)) == config
    for changes, message in (
        ({"n_head": 3}, r"unknown key model\.n_head of tiny; valid: context, depth"),
        ({"depth": 1}, r"model\.depth=1: expected at least 2"),
        ({"gate": "shot"}, r"model\.gate=shot is not a choice; did you mean 'shut'"),
        ({"vocab_size": 0}, r"model\.vocab_size=0: expected at least 1"),
        ({"family": "tine"}, r"family=tine is not a choice; did you mean 'tiny'"),
    ):
        with pytest.raises(UserError, match=message):
            from_tree(Config, tiny | {"model": tiny["model"] | changes})
    del tiny["model"]["depth"]
    with pytest.raises(UserError, match=r"missing key model\.depth of tiny"):
        from_tree(Config, tiny)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=abc", "train.steps=abc: expected a whole number, found text"),
        (
            "launcher.workers=3",
            "workers=3: expected a list of whole numbers, such as launcher.workers=[1,",
        ),
        ("train.phases=3", "a list of groups of keys, such as train.phases=[{key:val"),
        ("data.stages=3", "expected a list of lists, such as data.stages=[[1,2],[3,4"),
        ("data.weights={a:null}", "data.weights={a:null}: expected a list of numbers"),
        ("data.document_mask=null", "mask=null: expected true or false, found nothing"),
        ("run_dir=[1]", "run_dir=[1]: expected text, found a list"),
        ("train.steps=0", "at least 1"),
        ("model.mlp=gelo", "did you mean 'gelu'"),
        ("model.n_head=3", "model.d_model="),
        ("train.batch_tokens=1000", "nearest valid"),
        ("train.grad_accum_steps=7", "train.batch_tokens"),
        ("data=text", "train(config, data=TEXTS), without data="),
        ("data.column=body", "data=text or data=hf"),
        ("data.paths=x", "expected a list"),
        ("profile.steps=[5,100000]", "within 1.."),
        ("optimizer.b2=0.99999999", "[0, 1 - 2^-24]"),
        ("train.final_eval_batches=15", "is less than train.eval_batches=16"),
        ("parallel.data=0", "-1"),
        ("seed=4294967296", "4294967295"),
        ("data.val_fraction=0", "validation"),
        ("model.value_gain=3", "power of two"),
        ("precision.forward=e4m33", "eXmY"),
        ("optimizer.lr=inf", "a finite number"),
        ("sample.top_p=0", "more than 0, at most 1"),
        ("sample.prompt=''", "a first word"),
    ],
)
def test_bad_values_are_refused_with_the_valid_ones(override, says):
    with pytest.raises(UserError) as refusal:
        configured(override)
    message = str(refusal.value)
    assert "\n" not in message
    assert says in message
    assert override.partition("=")[0].removesuffix(".source") in message


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("modle.n_layer", "unknown key modle.n_layer; did you mean 'model'"),
        ("train.stpes", "unknown key train.stpes; did you mean 'train.steps'"),
        ("model.n_layer.x", "model.n_layer has no keys"),
        ("lr", "unknown key lr; did you mean model.lr or optimizer.lr?"),
        ("nonsense", "unknown key nonsense; valid: checkpoint"),
    ],
)
def test_a_wrong_key_names_the_nearest_valid_one(key, says):
    assert says in describe_wrong_key(key, to_tree(compose_config([])))


@pytest.mark.parametrize(
    ("source", "ignored"),
    [
        (["data=text", "data.paths=[a]"], ["name=a", "config=b", "split=c"]),
        (["data=hf", "data.name=a/b"], ["paths=[a]", "format=text", "prepared_dir=x"]),
        (["data=prepared", "data.prepared_dir=x"], ["val_fraction=0.2", "workers=2"]),
    ],
)
def test_a_setting_that_the_source_does_not_use_is_refused(source, ignored):
    for setting in ignored:
        name = setting.partition("=")[0]
        message = rf"data\.{name}=.* is not used by {source[0]}, and would"
        with pytest.raises(UserError, match=message):
            configured(*source, f"data.{setting}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["data.paths=[book.txt]"], "it belongs to data=text: add data=text"),
        (["data=null"], "data=null: expected one of embedded, hf, mix"),
        (["data=1"], "data=1: expected one of embedded, hf, mix"),
        (["data={a:1}"], "data is a group of keys; give them one by one, such as data"),
        (["~seed", "seed=3"], "seed cannot be set, because another argument removes"),
        (["~seed"], "missing key seed; add seed=VALUE, or GROUP=CHOICE, which sets it"),
        (["optimizer.name=lion"], "unknown key optimizer.eps of lion"),
        (["precision=scalify_fp8_f16"], "did you mean 'scalify_fp8_fp16'"),
        (["data.paths=[a (1).txt]"], "need quotes within quotes"),
        (
            ["seed=1", "init_from=ck/epoch=1-step=2"],
            "need quotes within quotes: \"init_from='ck/epoch=1-step=2'\"",
        ),
        (
            ["data=text", "data.paths=[d/*.{txt,md},a.txt]"],
            "braces are not understood in a pattern; list the patterns:"
            " data.paths=[d/*.txt,d/*.md,a.txt]",
        ),
        # as bash writes [d/*.{txt,md}]
        (
            ["data=text", "data.paths=[d/*.txt]", "data.paths=[d/*.md]"],
            "'data.paths=[d/*.txt,d/*.md]'",
        ),
        (["train.steps=1", "++train.steps=2"], "give train.steps once"),
        (["resume=none", "resume.source=auto"], "resume.source=auto"),
        (["run_dir=/proc/none"], "run_dir=/proc/none"),
        (["--multirun", "train.steps=0,-1"], "train.steps=-1"),
    ],
)
def test_bad_input_on_the_command_line_is_one_line_and_exit_code_2(
    arguments, says, tmp_path, command_line
):
    done = command_line(*arguments)
    assert done.returncode == 2, done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())
    assert says in done.stderr
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files <= {"multirun.yaml"}


def test_cfg_job_prints_the_configuration_and_takes_a_key_twice_alike(command_line):
    given = ["seed=3", "resume=none", "model=gpt2_124m", "run_dir=a", "seed=3"]
    done = command_line("-c", "job", *given, "--resolve")
    assert (done.returncode, done.stderr) == (0, "")
    tree = yaml.safe_load(done.stdout)
    assert (tree["seed"], tree["resume"]["source"], tree["run_dir"]) == (3, "none", "a")
    assert tree["model"]["d_model"] == 768


@pytest.mark.parametrize("name", ["2.5", "1e3", "1_000", "true", "nan", "-1"])
def test_a_name_that_reads_as_a_number_is_a_name(name):
    names = [f"{key}={name}" for key in ("init_from", "run_dir", "data.tokenizer")]
    c = compose_config(names)
    assert (c.init_from, c.run_dir, c.data.tokenizer) == (name, name, name)
    data = compose_config(["data=mix", f"data.sources=[{name},web.jsonl]"]).data
    assert data.sources == (name, "web.jsonl")


def test_a_number_in_a_file_is_no_text(tmp_path):
    """1.10 is 1.1 to YAML: another directory, another tag of a data set."""
    for key in ("run_dir", "init_from", "data.revision", "tracker.name"):
        (tmp_path / "my.yaml").write_text(f"{key}: 1.10\n")
        message = rf"{key}=1\.1: expected text, found a number, .* put it in quotes"
        with pytest.raises(UserError, match=message):
            compose_config([f"config={tmp_path / 'my.yaml'}"])
    (tmp_path / "my.yaml").write_text(
        "run_dir: '1.10'\ntracker.tags: ['1_0', '0x10']\n"
    )
    config = compose_config([f"config={tmp_path / 'my.yaml'}"])
    assert (config.run_dir, config.tracker.tags) == ("1.10", ("1_0", "0x10"))


def test_a_number_on_the_command_line_is_text_where_text_is_expected():
    config = compose_config(["sample.prompt=1.10", "run_dir=1_0", "tracker.tags=[1e3]"])
    assert config.sample.prompt == "1.10"
    assert (config.run_dir, config.tracker.tags) == ("1_0", ("1e3",))
    with pytest.raises(UserError, match="expected text, found a number"):
        compose_config(["train.phases=[{trainable:[1.10]}]"])


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "a\udfff\ud800"])
def test_a_text_that_no_file_can_be_named_by_is_refused(text):
    with pytest.raises(UserError, match=r"run_dir=.*: a text may hold neither"):
        from_saved(Config, to_tree(compose_config([])) | {"run_dir": text})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2_nano", "model.vocab_size=100 is smaller than the tokenizer's 256 ids;"),
        (
            "from_init",
            "100, the vocabulary of the weights, is smaller than the .* if this is"
            " theirs, .* without rows, such as one for padding, and init.embeddings=copy",
        ),
    ],
)
def test_a_vocabulary_that_is_too_small_says_whose_it_is(name, message):
    c = configured("model=gpt2_nano", "model.vocab_size=100")
    model = dataclasses.replace(c.model, name=name)
    with pytest.raises(UserError, match=message):
        build_model(model, c.precision.policy, 256)


def test_moments_that_the_optimizer_cannot_store_are_refused():
    lion = ["optimizer=lion", "precision=scalify_fp8_fp16"]
    message = r"nu=fp16, but optimizer=lion has no such moment; set precision\.nu=fp32"
    with pytest.raises(UserError, match=message):
        configured(*lion)
    configured(*lion, "precision.nu=fp32")
    message = r"mu=fp32, but precision\.update=propagate computes in fp16"
    with pytest.raises(UserError, match=message):
        configured("precision=scalify_fp8", "precision.update=propagate")
