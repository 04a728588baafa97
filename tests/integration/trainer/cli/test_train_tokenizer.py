"""A tokenizer from text: the same each time, readable by the trainer and by Hugging
Face's library."""

import json

import pytest
from tokenizers import Tokenizer as HFTokenizer

from trainer.cli.commands import run
from trainer.data import Manifest, TextSource, get_tokenizer, prepare

TEXT = "the cat sat on the mat; the rat sat on the hat. That was thát!\n" * 50


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text('{"text": "hats and mats 123 1234"}\n' * 20)
    return ["data=text", f"data.paths=[{tmp_path / 'a.txt'},{tmp_path / 'b.jsonl'}]"]


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k_base"])
def test_it_is_the_same_each_time_and_both_libraries_read_it_alike(
    text, pattern, tmp_path, capsys
):
    given = [*text, "vocab_size=285", f"pattern={pattern}", "all_text=yes"]
    given.append(f"data.cache_dir={tmp_path / 'cache'}")
    for out in "xy":
        assert run("train-tokenizer", [*given, f"out={tmp_path / out}"]) == 0
    size = len(TEXT.encode()) + 20 * 22
    assert f"285 tokens from {size:,} bytes" in capsys.readouterr().out
    files = [tmp_path / out / "tokenizer.json" for out in "xy"]
    assert files[0].read_bytes() == files[1].read_bytes()
    ours = get_tokenizer(str(tmp_path / "x"))
    assert ours.vocab_size == 285
    theirs = HFTokenizer.from_file(str(files[0]))
    for sample in (TEXT, "unseen — words, 42 of them\n\n  indented", "é"):
        assert ours.encode(sample) == theirs.encode(sample).ids
        assert ours.decode(ours.encode(sample)) == sample
    assert len(ours.encode(TEXT)) < len(TEXT.encode()) / 3
    assert ours.encode("<|endoftext|>") != [ours.eot]  # no document can pretend to end


# a single text, too few for hashes, enough
@pytest.mark.parametrize("documents", [1, 30, 300])
def test_what_a_run_validates_on_is_left_out(documents, tmp_path, capsys):
    rows = [f"{i % 26} {i // 26} {i} words\n" for i in range(max(documents, 30))]
    if documents == 1:
        path = tmp_path / "a.txt"
        path.write_text("".join(rows))
    else:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    cache = tmp_path / "cache"
    given = ["data=text", f"data.paths=[{path}]", "vocab_size=260"]
    given.append(f"data.cache_dir={cache}")
    assert run("train-tokenizer", [*given, f"out={tmp_path / 'x'}"]) == 0
    output = capsys.readouterr().out
    source = TextSource((str(path),))
    manifest = Manifest.load(prepare(source, "byte", cache, val_fraction=0.1))
    sizes = {name: split.bytes for name, split in manifest.splits.items()}
    assert sum(sizes.values()) == sum(map(len, rows))
    assert f"from {sizes['train']:,} bytes of text" in output


def test_bad_input_is_one_line(text, tmp_path, capsys):
    def refusal(*given):
        given = [*given, f"data.cache_dir={tmp_path / 'cache'}"]
        assert run("train-tokenizer", given) == 2
        return capsys.readouterr().err

    out = f"out={tmp_path / 'x'}"
    assert "expected 257" in refusal(*text, "vocab_size=200", out)
    few = refusal(*text, "vocab_size=300", "max_chars=-1", out)
    assert "max_chars=-1: expected 1 or more" in few
    nothing = ["data=text", f"data.paths=[{tmp_path / 'nothing'}]"]
    assert "nothing" in refusal(*nothing, "vocab_size=300", out)
    assert "did you mean vocab_size?" in refusal("vocab_sise=300", out)
    assert not (tmp_path / "x").exists()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "tokenizer.json").write_text("{}")
    assert "exists" in refusal(*text, "vocab_size=300", out)
