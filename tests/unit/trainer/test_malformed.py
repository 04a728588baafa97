"""A reader reads damaged files or answers with one line: each is given
300 damaged ones."""

import copy
import json
import shutil
import time
from pathlib import Path

import families
import library_tokenizers
import pytest
import yaml
from corpora import write
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from library_tokenizers import write_tiktoken
from run_records import tensor

from trainer.assembly.saved_model import restore_run
from trainer.cli.arguments import run_main
from trainer.cli.train_tokenizer import train_bpe
from trainer.config.composition import compose_config
from trainer.config.fields import to_tree
from trainer.data import Manifest, TextSource, get_tokenizer, prepare, shards
from trainer.data.hf_tokenizer import token_ids_in
from trainer.data.shards import MANIFEST
from trainer.data.tokenizer import load_saved
from trainer.errors import UserError, complain
from trainer.models import huggingface
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.registry import SPECS
from trainer.observe.display import Display
from trainer.observe.records import (
    Sample,
    cut_samples,
    encode_row,
    encode_sample,
    read_samples,
)
from trainer.observe.trackers.jsonl import Digest
from trainer.parallel.diloco import DiLoCoSettings
from trainer.report import page
from trainer.report.comparison import write_comparison
from trainer.report.page import write_report
from trainer.run.checkpoint import Checkpointer
from trainer.run.checkpoint_manifest import digest_of
from trainer.run.compatibility import check_no_replicas, check_same_model
from trainer.run.initial_weights import with_context_of
from trainer.run.metadata import saved_policy, saved_trainable
from trainer.run.rundir import config_differences
from trainer.run.start import has_same_form, saved_diloco
from trainer.run.vocabulary import vocabulary_of
from trainer.step.state_tree import as_saved
from trainer.text import note, show

DATA = Path(__file__).resolve().parents[2] / "data"
ODD = [
    None,
    True,
    -1,
    0,
    10**9,
    10**400,
    1.5,
    1e300,
    "",
    "x",
    "é\ud800",
    "../x",
    [],
    [[]],
    {},
    {"x": 1},
    "${oc.env:HOME}",
]
TEXTS = [
    "[" * 20_000,
    "{",
    "null",
    "3",
    "[]",
    '"x"',
    "\x00",
    '{"a":' * 3000,
    "NaN",
    "1e999",
]


def nodes(tree, path=()):
    yield path
    items = enumerate(tree) if isinstance(tree, list) else ()
    if isinstance(tree, dict):
        items = tree.items()
    for key, value in items:
        yield from nodes(value, (*path, key))


def replaced(tree, path, value):
    if not path:
        return value
    tree = copy.copy(tree)
    tree[path[0]] = replaced(tree[path[0]], path[1:], value)
    return tree


@st.composite
def damaged(draw, data):
    """The bytes of a file with one thing wrong: a value in JSON, the text of all, or
    some bytes."""
    kind = draw(st.sampled_from(["value", "value", "value", "bytes", "cut", "text"]))
    if kind == "value":
        lines = data.split(b"\n")
        number = draw(st.integers(0, len(lines) - 1))
        for lines_before, part, lines_after in (
            ([], data, []),
            (lines[:number], lines[number], lines[number + 1 :]),
        ):
            try:
                tree = json.loads(part)
            except ValueError:
                continue
            path = draw(st.sampled_from(list(nodes(tree))[:400]))
            new = json.dumps(replaced(tree, path, draw(st.sampled_from(ODD)))).encode()
            return b"\n".join([*lines_before, new, *lines_after])
    if kind == "text":
        return draw(st.sampled_from(TEXTS)).encode()
    at = draw(st.integers(0, len(data)))
    if kind == "cut":
        return data[:at]
    return (
        data[:at]
        + draw(st.binary(min_size=1, max_size=4))
        + data[at + draw(st.integers(0, 4)) :]
    )


@pytest.fixture(params=families.quick([30, 300], 30))
def count(request):
    """The number of damaged files: some in `make test`, all in `make test-all`."""
    return request.param


def seconds_of(read):
    """Return the processor seconds of a reader that returns or raises one line."""
    begun = time.process_time()
    message = ""
    try:
        read()
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    return time.process_time() - begun


def check_each(count, strategy, read):
    """Read examples: each gives a result, or one line of a UserError, within seconds."""

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(example):
        # The first reading may compile.
        assert any(seconds_of(lambda: read(example)) < 5 for _ in range(2))

    each()


def check(file, read, count):
    """Read damaged versions of a file."""
    content = file.read_bytes()

    def read_damaged(data):
        file.write_bytes(data)
        read()

    check_each(count, damaged(content), read_damaged)
    file.write_bytes(content)


TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without"
    " form, and void.\n" * 20
)


@pytest.fixture(scope="module")
def tokenizers_json(tmp_path_factory):
    """A tokenizer.json that tiktoken encodes, and one that Hugging Face's library
    encodes."""
    folder = tmp_path_factory.mktemp("tokenizers")
    trees = {
        "tiktoken": train_bpe(iter([TEXT]), 300, "gpt2"),
        "library": library_tokenizers.unigram().to_str(),
    }
    beside = '{"eos_token": "</s>"}'
    files = {f"{kind}/tokenizer.json": tree for kind, tree in trees.items()}
    return write(folder, files | {"library/tokenizer_config.json": beside})


@pytest.mark.parametrize("kind", ["tiktoken", "library"])
def test_a_tokenizer_json(tokenizers_json, kind, count):
    folder = tokenizers_json / kind
    check(
        folder / "tokenizer.json",
        lambda: (get_tokenizer(str(folder)), token_ids_in(folder)),
        count,
    )


def test_settings_beside_a_tokenizer(tokenizers_json, count):
    folder = tokenizers_json / "library"
    check(folder / "tokenizer_config.json", lambda: get_tokenizer(str(folder)), count)


@pytest.mark.parametrize("name", ["tokenizer.tiktoken", "tokenizer.json"])
def test_the_tokenizer_of_a_run(tokenizers_json, tmp_path, name, count):
    get_tokenizer(str(tokenizers_json / "tiktoken")).save(tmp_path)
    check(tmp_path / name, lambda: load_saved("mine", tmp_path), count)


@pytest.fixture
def run_dir(tmp_path):
    row = {"train/loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 64}
    row |= {"val/loss": 3.0} | tensor("weights", "h.0") | tensor("weights", "h.1")
    rows = [row, row, {"event": "step 3 skipped"}]
    results = [
        {"precision": "as trained", "loss": 3.0},
        {"precision": "bf16", "loss": None},
    ]
    files = {
        "metrics.jsonl": b"".join(encode_row(n, row) for n, row in enumerate(rows, 1)),
        "config.yaml": yaml.safe_dump(to_tree(compose_config(["run_dir=run"]))),
        "environment.txt": "python: 3.12\ntraining tokens: 1,000\nparameters: 3\n",
        "samples.txt": encode_sample(Sample(3, "samples", "In the\nbeginning")),
        "evaluation.json": json.dumps({"step": 3, "tokens": 64, "results": results}),
    }
    return write(tmp_path / "run", files)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "environment.txt", "evaluation.json"]
)
def test_files_of_reports_and_comparisons(run_dir, name, count, monkeypatch):
    if name in ("environment.txt", "evaluation.json"):  # of which nothing is drawn
        monkeypatch.setattr(page, "draw_charts", lambda charts: [])
    other = shutil.copytree(run_dir, run_dir.with_name("other"))

    def read():
        write_report(run_dir)
        write_comparison([run_dir, other], None)

    write_report(run_dir)
    check(run_dir / name, read, count // 5)


def test_samples(run_dir, count):
    check(run_dir / "samples.txt", lambda: read_samples(run_dir / "samples.txt"), count)


def test_a_saved_configuration(run_dir, monkeypatch, count):
    monkeypatch.chdir(run_dir.parent)
    check(run_dir / "config.yaml", lambda: compose_config(["resume=run"]), count)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights(tmp_path, family, name, count):
    folder = shutil.copytree(DATA / "families" / family, tmp_path / "weights")
    spec = SPECS[family](vocab_size=67)
    check(folder / name, lambda: huggingface.load(folder, spec), count // 4)
    if name == "config.json":
        given = [
            "model=from_init",
            f"init_from={folder}",
            "train.batch_tokens=64",
            "init.embeddings=mean",
        ]
        check(folder / name, lambda: compose_config(given), count // 4)


def seal(data, digest):
    """A manifest with the digest of its content, if it can have one."""
    try:
        tree = json.loads(data)
        tree.pop("digest", None)
        return json.dumps(tree | {"digest": digest(tree)}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


@pytest.mark.parametrize("name", ["fp32", "local"])
def test_metadata_of_a_checkpoint_with_a_valid_digest(tmp_path, name, count):
    run_dir = shutil.copytree(DATA / "saved_by_7ef3f38" / name, tmp_path / "run")
    file = run_dir / "checkpoints" / "2" / "manifest" / "metadata"
    spec = GPT2Spec(vocab_size=256, context=16, n_layer=1, n_head=2, d_model=16)
    diloco = DiLoCoSettings(2, 2, "fp32", 1.0, 0.0, False, 1, 2, 2)

    def read():
        file.write_bytes(seal(file.read_bytes(), digest_of))
        with Checkpointer.reading(run_dir / "checkpoints") as checkpointer:
            meta, leaves = checkpointer.manifest()[1:]
            saved_policy(meta)
            saved_trainable(meta)
            has_same_form(saved_diloco(meta, diloco), diloco)
            check_no_replicas("it", meta)
            Digest.from_checkpoint((meta.get("log") or {}).get("samples"))
            check_same_model("it", with_context_of(spec, "it", meta["model"]), spec)
            as_saved({"params": {}}, leaves)
        config_differences(meta["config"], {})
        vocabulary_of(run_dir)
        restore_run(run_dir)

    check(file, read, count // 2)


def test_a_manifest_of_shards(tmp_path, count):
    (tmp_path / "text.txt").write_text(TEXT)
    folder = prepare(
        TextSource((str(tmp_path / "text.txt"),)),
        "byte",
        tmp_path / "cache",
        val_fraction=0.1,
    )
    file = folder / MANIFEST

    def read():
        file.write_bytes(seal(file.read_bytes(), shards.digest))
        Manifest.load(folder).get_tokenizer()

    check(file, read, count)


OVERRIDES = [
    "model.n_layer=2",
    "data.paths=[a,'b c']",
    "train.phases=[{until:3,trainable:[embeddings],lr:1e-3}]",
    "tracker.name='x y'",
    "precision=sim_e3m4",
    "optimizer.lr=1e-3",
    "+a.b=1",
    "resume=auto",
]


def test_overrides(count):
    words = st.sampled_from(OVERRIDES).flatmap(lambda word: damaged(word.encode()))
    check_each(
        count, words, lambda word: compose_config([word.decode(errors="replace")])
    )


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, capsys):
    assert run_main(lambda: print(tmp_path.read_text())) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["optimizer.lr", "train.steps", "seed"])
def test_a_number_of_hundreds_of_digits_is_one_line(setting):
    with pytest.raises(UserError, match=r"at most 64 bits|valid|expected|seed"):
        compose_config([f"{setting}=1{'0' * 400}"])


def test_a_sample_of_a_step_of_thousands_of_digits_is_no_sample(tmp_path):
    path = tmp_path / "samples.txt"
    encoded_sample = encode_sample(Sample(3, "samples", "In the beginning"))
    path.write_bytes(encoded_sample + b"step 1" + b"0" * 5000 + b' | "samples"\n  x\n')
    assert [sample.step for sample in read_samples(path)] == [3]
    cut_samples(path, 3)
    assert path.read_bytes() == encoded_sample


def test_a_word_pattern_that_the_library_gives_up_is_one_line(tmp_path):
    path = write_tiktoken(tmp_path / "a.tiktoken", r"\w*\w*\w*(?!a)(?=z)|.")
    tokenizer = get_tokenizer(str(path))
    for encode in (tokenizer.encode, tokenizer.encode_array):
        with pytest.raises(
            UserError, match=r"a.tiktoken: tiktoken cannot split a text"
        ):
            encode("a" * 2000)


def test_what_a_terminal_obeys_is_spelled_out(capsys):
    text = "a\tb\nc\x1b[2J\r\x07\u202e"
    complain(text)
    assert capsys.readouterr().err == "error: a\tb\nc\\x1b[2J\\r\\x07\\u202e\n"
    note(text)
    assert "\x1b" not in capsys.readouterr().err
    show(text)  # not to a terminal
    assert capsys.readouterr().out == text + "\n"
    Display(1).event(1, text)
    assert "\\x1b[2J" in capsys.readouterr().out


def test_half_of_a_surrogate_pair_is_spelled_out(capfd):
    show("x\ud800é")
    assert capfd.readouterr().out == "x\\ud800é\n"
    Display(1).event(1, "x\ud800é")
    assert "x\\ud800é" in capfd.readouterr().out


def test_a_text_is_spelled_out_in_a_terminal_only(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show("\x1b]0;title\x07")
    assert capsys.readouterr().out == "\\x1b]0;title\\x07\n"
