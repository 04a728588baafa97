"""The documents' examples run as they stand, and learn; commands and links of all
documents are valid."""

import ast
import importlib
import json
import logging
import os
import re
import shlex
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer as HFTokenizer

from scalify_core.array.scaled_array import is_scaled_array
from scalify_core.interpreter import registry
from trainer.cli import evaluate, train_tokenizer
from trainer.cli import export as export_run
from trainer.cli.arguments import parse
from trainer.cli.composing import split_arguments
from trainer.cli.train import SIGNAL_EXIT_CODES, main
from trainer.config.composition import (
    Sweep,
    compose_config,
    expand_arguments,
    is_sweep,
)
from trainer.data import get_tokenizer
from trainer.data.hf_tokenizer import save_hf
from trainer.errors import UserError
from trainer.models.gpt2.model import functional
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.huggingface import save
from trainer.run.shutdown import HUNG, SIGNALS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(document):
    """The arguments of the `python -m trainer` lines of a document's code blocks."""
    blocks = "\n".join(
        re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL)
    ).replace("\\\n", " ")
    lines = [
        line for line in blocks.splitlines() if line.startswith("python -m trainer")
    ]
    return [shlex.split(line, comments=True)[3:] for line in lines]


def test_the_commands_of_all_documents_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("tokenizers/mine", "runs/tables"):  # else they are ids of the hub
        Path(path).mkdir(parents=True)
    checked = 0
    different = {
        tuple(arguments): None
        for document in DOCUMENTS
        for arguments in commands(document)
    }
    for arguments in map(list, different):
        if "model=from_init" in arguments:  # whose directory is not here
            arguments = [a for a in arguments if a != "model=from_init"]
        if is_sweep(arguments):
            assert Sweep.parse(expand_arguments(arguments).overrides).problems({}) == []
        else:
            compose_config([a for a in arguments if a not in ("--cfg", "job")])
        checked += 1
    assert checked > 15


def test_the_other_commands_of_all_documents_have_valid_keys():
    checked = set()
    for document in DOCUMENTS:
        blocks = re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            program, _, rest = line.partition(" ")
            if program != "scalify-trainer" or "--help" in line:
                continue
            name, *arguments = shlex.split(rest, comments=True)
            module = importlib.import_module(f"trainer.cli.{name.replace('-', '_')}")
            only = "data" if name in ("prepare-data", "train-tokenizer") else None
            split_arguments(module.Arguments, arguments, only)
            checked.add(name)
    assert len(checked) > 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        path, _, heading = link.partition("#")
        if path.startswith("http"):
            continue
        target = document.parent / path if path else document
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        assert not heading or heading in [
            re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings
        ]


def test_every_exit_code_is_documented():
    text = (ROOT / "docs" / "exit_codes.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+) ", text, re.MULTILINE)}
    actual = {
        0,
        1,
        HUNG,
        *SIGNAL_EXIT_CODES,
        *(128 + number for number in SIGNALS),
        128 + signal.SIGPIPE,
    }
    actual |= {error.exit_code for error in (UserError, *UserError.__subclasses__())}
    for path in [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in (
                "main",
                "run",
                "run_command_line",
            ):
                codes = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "sys.exit",
                "os._exit",
                "SystemExit",
            ):
                codes = node.args
            else:
                continue
            actual |= {
                code.value
                for code in codes
                if isinstance(code, ast.Constant) and type(code.value) is int
            }
    assert listed == actual


def test_every_document_is_named_in_the_readme():
    text = README.read_text()
    for document in (ROOT / "docs").glob("*.md"):
        assert document.name == "README.md" or f"docs/{document.name}" in text, document


def blocks(document):
    """The Python programs of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.slow  # trainer/test_library.py does
def test_the_trainer_is_used_from_python_as_its_page_does(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code = next(block for block in blocks("docs/python.md") if "CausalModel" in block)
    assert len(code.splitlines()) <= 40
    cached = code.replace(
        '"tracker=jsonl"',
        f'"tracker=jsonl", "compile_cache={os.environ["SCALIFY_TEST_CACHE"]}"',
    )
    for steps in (60, 65):  # the second goes on from the first
        exec(cached.replace("train.steps=60", f"train.steps={steps}"), {})
        step, loss, rms, told, run_dir = capsys.readouterr().out.split()[-5:]
        assert (int(step), int(told), run_dir) == (steps, steps, "runs/walk")
        assert float(loss) < 0.5 * np.log(64)  # that of a guess among 64 ids
        assert 0.01 < float(rms) < 1


def test_the_loop_of_the_readme_runs_and_learns(capsys):
    (code,) = blocks("README.md")
    names: dict = {}
    exec(code, names)
    # the same program in FP32 throughout ends at 0.1855
    assert 0.18 < float(capsys.readouterr().out) < 0.19
    arrays = jax.tree.leaves(names["w"], is_leaf=is_scaled_array)
    assert {x.dtype for x in arrays} == {np.dtype(np.float16)}


# The page has the same model from NNX and from Linen.
@pytest.mark.slow  # scalify_core/test_flax_models.py has such models
@pytest.mark.parametrize("number", [0, 1], ids=["nnx", "linen"])
def test_scalify_on_ones_own_model_runs_and_learns(number, capsys):
    # whole programs
    code = [
        block
        for block in blocks("docs/own_model.md")
        if "scalify(" in block and "import" in block
    ][number]
    names: dict = {}
    with jax.numpy_rank_promotion("allow"):  # Flax's own layers promote ranks
        exec(code, names)
    loss = float(capsys.readouterr().out)
    # that of a guess among 64 tokens, which the untrained model makes
    assert loss < 0.5 * np.log(64)
    arrays = jax.tree.leaves(names["params"], is_leaf=is_scaled_array)
    assert {x.dtype for x in arrays} == {np.dtype(np.float16)}
    # those that began as zeros, too
    moved = [float(abs(x.unscale()).max()) for x in arrays]
    assert min(moved) > 1e-4
    text = str(
        jax.make_jaxpr(names["step"])(
            names["params"], names["state"], names["tokens"], 0
        )
    )
    assert "f8_e4m3fn" in text
    assert "f8_e5m2" in text


def test_the_rule_of_the_page_is_right_and_needed():
    (code,) = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs" / "writing_a_rule.md").read_text(),
        re.DOTALL,
    )
    try:
        exec(code, {})
        without = (
            code[: code.index("@composite_rule")] + code[code.index("for exponent") :]
        )
        del registry.rules["composite cube"]
        with pytest.raises(AssertionError, match="65504"):  # at scale 1, out of range
            exec(without, {})
    finally:
        registry.rules.pop("composite cube", None)


def adaptation():
    """The lines of the journey from other weights, in their order."""
    text = (ROOT / "docs" / "fine_tune.md").read_text()
    block = re.findall(r"```sh\n(hf download.*?)```", text, re.DOTALL)[0]
    return [
        shlex.split(line, comments=True)
        for line in block.replace("\\\n", " ").splitlines()
    ]


@pytest.mark.slow  # trainer/test_library.py does
def test_texts_are_trained_on_as_the_page_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    for name in "abc":
        Path("books", f"{name}.txt").write_text(f"{name} is a letter. " * 400)
    [code] = [block for block in blocks("docs/python.md") if "data=texts" in block]
    small = [
        "model.n_layer=1",
        "model.n_head=2",
        "model.d_model=32",
        "model.context=32",
        "train.batch_tokens=256",
        "train.eval_every=0",
        "sample.max_new_tokens=0",
        "metrics.numerics_every=0",
        f"compile_cache={os.environ['SCALIFY_TEST_CACHE']}",
    ]
    given = ", ".join(map(repr, ["train.steps=3", *small]))
    exec(code.replace('"train.steps=50"', given), {})
    assert "step=3" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow  # test_end_to_end.py takes its architecture from weights
def test_the_five_commands_from_other_weights_work_at_toy_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])
    download, making, training, evaluation, export = adaptation()
    assert download[:2] == ["hf", "download"]
    spec = GPT2Spec(vocab_size=256, context=64, n_layer=1, n_head=2, d_model=32)
    save(download[-1], spec, functional(spec).init(jax.random.key(0)), 0)
    save_hf(Path(download[-1]), get_tokenizer("byte"), spec.context)
    Path("books").mkdir()
    words = np.random.default_rng(0).choice(
        ["moon", "light", "falls", "over", "water", "slowly", "tonight"], 12000
    )
    Path("books", "a.txt").write_text(" ".join(words.tolist()))

    toy = {"vocab_size=16384": "vocab_size=300", "train.steps=2000": "train.steps=4"}
    small = lambda line: [
        toy.get(word, word).replace("until:300", "until:2")
        for word in line[3 if line[0] == "python" else 2 :]
    ]
    assert train_tokenizer.command([*small(making), "data.cache_dir=cache"]) == 0
    here = [
        "train.batch_tokens=256",
        "tracker=jsonl",
        "sample.max_new_tokens=0",
        "metrics.numerics_every=0",
        "parallel.data=1",
    ]
    here += [
        "train.eval_batches=1",
        "train.final_eval_batches=1",
        f"compile_cache={os.environ['SCALIFY_TEST_CACHE']}",
    ]
    assert main([*small(training), *here]) == 0
    evaluate.main(parse(evaluate.Arguments, [*small(evaluation), "limit=10"]))
    export_run.main(parse(export_run.Arguments, small(export)))
    [result] = json.loads(Path("runs/adapted/tasks.json").read_text())["results"]
    assert 0 <= result["tasks"]["word_order"]["acc"]["value"] <= 1
    tokenizer, text = get_tokenizer("tokenizers/mine"), "moonlight falls over the water"
    assert (
        json.loads(Path("adapted/config.json").read_text())["vocab_size"]
        == tokenizer.vocab_size
    )
    ours = tokenizer.encode(text)
    assert HFTokenizer.from_file("adapted/tokenizer.json").encode(text).ids == ours
    assert len(ours) < len(text) / 2
