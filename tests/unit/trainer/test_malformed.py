"""Whatever its files hold, a reader answers with one line or reads them: each is given
300 damaged ones."""

import base64
import copy
import json
import shutil
import time
from pathlib import Path

import families
import jax
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trainer.assembly.saved_model import restore_run
from trainer.cli.arguments import run_main
from trainer.config.composition import compose_config
from trainer.config.fields import to_tree
from trainer.data import Manifest, TextSource, get_tokenizer, prepare, shards
from trainer.data.files import begins_like_json, first_bytes
from trainer.data.hf_tokenizer import token_ids_in
from trainer.data.json_tokenizer import parse_tokenizer
from trainer.data.shards import MANIFEST
from trainer.data.tokenizer import load_saved
from trainer.errors import UserError, complain
from trainer.models import huggingface
from trainer.models.gpt2 import model as gpt2
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.llama import model as llama
from trainer.models.llama.spec import LlamaSpec
from trainer.models.smollm3.spec import SmolLM3Spec
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
from trainer.report.comparing import write_comparison
from trainer.report.page import write_report
from trainer.run import checkpoint
from trainer.run.checkpoint import Checkpointer
from trainer.run.compatibility import check_no_replicas, check_same_model
from trainer.run.initial_weights import with_context_of
from trainer.run.metadata import saved_policy, saved_trainable
from trainer.run.rundir import config_differences
from trainer.run.start import has_same_form, saved_diloco
from trainer.run.vocabulary import vocabulary_of
from trainer.step.state_tree import as_saved
from trainer.text import note, show

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
    for key, value in (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    ):
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
        for whole, part in ((True, data), (False, lines[number])):
            try:
                tree = json.loads(part)
            except ValueError:
                continue
            path = draw(st.sampled_from(list(nodes(tree))[:400]))
            new = json.dumps(replaced(tree, path, draw(st.sampled_from(ODD)))).encode()
            return (
                new
                if whole
                else b"\n".join([*lines[:number], new, *lines[number + 1 :]])
            )
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
    """How many damaged files: some in `make test`, all in `make test-all`."""
    return request.param


def answer_of(read):
    """Return the line of a reader's UserError, or "", and its processor seconds."""
    begun = time.process_time()
    try:
        read()
    except UserError as error:
        message = str(error)
    else:
        message = ""
    return message, time.process_time() - begun


def check(file, read, count):
    """Damaged versions of a file: read, or one line of a UserError, within seconds."""
    whole = file.read_bytes()

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(whole))
    def each(data):
        file.write_bytes(data)
        message, seconds = answer_of(read)
        assert "\n" not in message
        # The first reading may compile.
        assert seconds < 5 or answer_of(read)[1] < 5

    each()
    file.write_bytes(whole)


TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without"
    " form, and void.\n" * 20
)


@pytest.fixture(scope="module")
def tokenizers_json(tmp_path_factory):
    """A small byte-pair encoding of Hugging Face's library, which is read as tiktoken
    reads it, and one that is not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folders = []
    for whole_alphabet in (True, False):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=not whole_alphabet
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet() if whole_alphabet else []
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=alphabet,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
        )
        tokenizer.train_from_iterator([TEXT], trainer)
        folders.append(tmp_path_factory.mktemp("tokenizer"))
        tokenizer.save(str(folders[-1] / "tokenizer.json"))
        (folders[-1] / "tokenizer_config.json").write_text(
            '{"eos_token": "<|endoftext|>"}'
        )
    return folders


@pytest.mark.parametrize("which", [0, 1])
def test_a_tokenizer_json(tokenizers_json, which, count):
    folder = tokenizers_json[which]
    check(
        folder / "tokenizer.json",
        lambda: (get_tokenizer(str(folder)), token_ids_in(folder)),
        count,
    )


def test_what_stands_beside_a_tokenizer(tokenizers_json, count):
    folder = tokenizers_json[1]
    check(folder / "tokenizer_config.json", lambda: get_tokenizer(str(folder)), count)


@pytest.mark.parametrize("name", ["tokenizer.tiktoken", "tokenizer.json"])
def test_the_tokenizer_of_a_run(tokenizers_json, tmp_path, name, count):
    get_tokenizer(str(tokenizers_json[0])).save(tmp_path)
    check(tmp_path / name, lambda: load_saved("mine", tmp_path), count)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [
        {
            "train/loss": 3.0 / n,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "tokens": 64 * n,
            "val/loss": 3.0,
        }
        for n in (1, 2, 3)
    ]
    rows[1] |= {
        f"numerics/weights/h.{i}/{name}": 0.5
        for i in (0, 1)
        for name in ("rms", "exponent", "underflow", "saturated")
    }
    data = [encode_row(n, row) for n, row in enumerate(rows, 1)]
    (folder / "metrics.jsonl").write_bytes(
        b"".join([*data, encode_row(3, {"event": "step 3 skipped"})])
    )
    (folder / "config.yaml").write_text(
        yaml.safe_dump(to_tree(compose_config(["run_dir=run"])))
    )
    (folder / "environment.txt").write_text(
        "python: 3.12\ntraining tokens: 1,000\noverrides: seed=1\nparameters: 3\n"
    )
    (folder / "samples.txt").write_bytes(
        encode_sample(Sample(3, "samples", "In the\nbeginning"))
    )
    results = [
        {"precision": "as trained", "loss": 3.0},
        {"precision": "bf16", "loss": None},
    ]
    (folder / "evaluation.json").write_text(
        json.dumps({"step": 3, "tokens": 64, "results": results})
    )
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "config.yaml",
        "environment.txt",
        "evaluation.json",
    ],
)
def test_what_a_report_and_a_comparison_read(run_dir, name, count):
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


def functional_of(spec):
    return (llama if isinstance(spec, LlamaSpec) else gpt2).functional(spec)


SPECS = {
    "gpt2": GPT2Spec(vocab_size=64, context=8, n_layer=1, n_head=2, d_model=16),
    "llama": LlamaSpec(
        vocab_size=64, context=8, n_layer=1, n_head=2, n_kv_head=1, d_model=16
    ),
}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("family", SPECS)
def test_weights(tmp_path, family, name, count):
    spec = SPECS[family]
    params = jax.tree.map(np.asarray, functional_of(spec).init(jax.random.key(0)))
    huggingface.save(tmp_path / "weights", spec, params)
    check(
        tmp_path / "weights" / name,
        lambda: huggingface.load(tmp_path / "weights", spec),
        count // 4,
    )
    if name == "config.json":
        given = [
            "model=from_init",
            f"init_from={tmp_path}/weights",
            "train.batch_tokens=64",
            "init.embeddings=mean",
        ]
        check(tmp_path / "weights" / name, lambda: compose_config(given), count // 4)


SAVED = Path(__file__).resolve().parents[2] / "data" / "saved_by_7ef3f38"


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
    run_dir = shutil.copytree(SAVED / name, tmp_path / "run")
    file = run_dir / "checkpoints" / "2" / "manifest" / "metadata"
    spec = GPT2Spec(vocab_size=256, context=16, n_layer=1, n_head=2, d_model=16)
    diloco = DiLoCoSettings(2, 2, "fp32", 1.0, 0.0, False, 1, 2, 2)

    def read():
        file.write_bytes(seal(file.read_bytes(), checkpoint._digest))
        with Checkpointer.reading(run_dir / "checkpoints") as checkpointer:
            meta = checkpointer.meta()
            saved_policy(meta)
            saved_trainable(meta)
            has_same_form(saved_diloco(meta, diloco), diloco)
            check_no_replicas("it", meta)
            Digest.from_checkpoint((meta.get("log") or {}).get("samples"))
            check_same_model("it", with_context_of(spec, "it", meta["model"]), spec)
            as_saved({"params": {}}, checkpointer.leaf_descriptions())
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
    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def each(draw):
        word = draw.draw(
            damaged(draw.draw(st.sampled_from(OVERRIDES)).encode())
        ).decode(errors="replace")
        try:
            compose_config([word])
        except UserError as error:
            message = str(error)
        else:
            message = ""
        assert "\n" not in message

    each()


def test_a_tokenizer_of_a_small_file_asks_for_no_large_table(tokenizers_json, tmp_path):
    tree = json.loads((tokenizers_json[1] / "tokenizer.json").read_text())
    tree["added_tokens"][0]["id"] = 10**9
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(
        UserError,
        match=r"has the id 1000000000, but .* gives it 0; write 0 there",
    ):
        get_tokenizer(str(tmp_path))


def test_layers_are_bounded_by_the_weights(tmp_path):
    spec = SPECS["llama"]
    params = jax.tree.map(np.asarray, functional_of(spec).init(jax.random.key(0)))
    huggingface.save(tmp_path / "weights", spec, params)
    file = tmp_path / "weights" / "config.json"
    for key, value in (
        ("num_hidden_layers", 900),
        ("vocab_size", 10**8),
        ("num_hidden_layers", 10**6),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
        begun = time.process_time()
        with pytest.raises(UserError, match=r"take at least|at most 1000"):
            huggingface.load(tmp_path / "weights", spec)
        assert time.process_time() - begun < 2


@pytest.mark.parametrize("rotated", [[1, 1, 0], [0], "0", {"0": 0}, 0])
def test_layers_without_positions_are_as_many_as_the_layers(rotated):
    config = {"num_hidden_layers": 10**12, "no_rope_layers": rotated}
    with pytest.raises(UserError, match="is not a list of num_hidden_layers"):
        SmolLM3Spec.extra_fields(config)


def test_a_tokenizer_with_dropout_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"dropout=0\.5"):
        parse_tokenizer(tmp_path / "tokenizer.json", {"model": {"dropout": 0.5}})


def test_a_text_of_deeply_nested_lists_is_no_json_lines(tmp_path):
    path = tmp_path / "deep.txt"
    path.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    assert not begins_like_json(first_bytes(path))


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, capsys):
    assert run_main(lambda: print(tmp_path.read_text())) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting", ["optimizer.lr", "train.steps", "seed", "model.d_model", "data.workers"]
)
def test_a_number_of_hundreds_of_digits_is_one_line(setting):
    with pytest.raises(UserError, match=r"at most 64 bits|valid|expected|seed"):
        compose_config([f"{setting}=1{'0' * 400}"])


def test_a_sample_of_a_step_of_thousands_of_digits_is_no_sample(tmp_path):
    path = tmp_path / "samples.txt"
    whole = encode_sample(Sample(3, "samples", "In the beginning"))
    path.write_bytes(whole + b"step 1" + b"0" * 5000 + b' | "samples"\n  x\n')
    assert [sample.step for sample in read_samples(path)] == [3]
    cut_samples(path, 3)
    assert path.read_bytes() == whole


def test_a_word_pattern_that_the_library_gives_up_is_one_line(tmp_path):
    ranks = (base64.b64encode(bytes([i])) + b" %d" % i for i in range(256))
    (tmp_path / "a.tiktoken").write_bytes(b"\n".join(ranks))
    settings = {
        "pat_str": r"\w*\w*\w*(?!a)(?=z)|.",
        "special_tokens": {"<|endoftext|>": 256},
    }
    (tmp_path / "a.json").write_text(json.dumps(settings))
    tokenizer = get_tokenizer(str(tmp_path / "a.tiktoken"))
    for encode in (tokenizer.encode, tokenizer.encode_array):
        with pytest.raises(UserError, match=r"a.tiktoken is damaged"):
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


def test_a_text_is_spelled_out_in_a_terminal_only(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show("\x1b]0;title\x07")
    assert capsys.readouterr().out == "\\x1b]0;title\\x07\n"
