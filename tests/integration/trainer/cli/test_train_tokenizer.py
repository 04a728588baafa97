"""A tokenizer from text: the same each time, readable by the trainer and by Hugging
Face's library."""

import json

import pytest
from tokenizers import Tokenizer as HFTokenizer

from trainer.cli.train_tokenizer import command
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
    for out in "xy":
        given = [
            *text,
            "vocab_size=285",
            f"pattern={pattern}",
            f"out={tmp_path / out}",
            "all_text=yes",
        ]
        assert command([*given, f"data.cache_dir={tmp_path / 'cache'}"]) == 0
    assert (
        f"285 tokens from {len(TEXT.encode()) + 20 * 22:,} bytes"
        in capsys.readouterr().out
    )
    x, y = ((tmp_path / out / "tokenizer.json").read_bytes() for out in "xy")
    assert x == y
    ours = get_tokenizer(str(tmp_path / "x"))
    assert ours.vocab_size == 285
    theirs = HFTokenizer.from_file(str(tmp_path / "x" / "tokenizer.json"))
    for sample in (TEXT, "unseen — words, 42 of them\n\n  indented", "é"):
        assert ours.encode(sample) == theirs.encode(sample).ids
        assert ours.decode(ours.encode(sample)) == sample
    assert len(ours.encode(TEXT)) < len(TEXT.encode()) / 3
    assert ours.encode("<|endoftext|>") != [ours.eot]  # no document can pretend to end


def test_a_text_with_few_pairs_gives_fewer_tokens_and_says_so(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc")
    given = [
        "data=text",
        f"data.paths=[{tmp_path / 'a.txt'}]",
        "vocab_size=500",
        f"out={tmp_path / 'x'}",
        "all_text=yes",
    ]
    assert command([*given, f"data.cache_dir={tmp_path}"]) == 0
    assert (
        "259 tokens from 3 bytes of text: the text has no more pairs"
        in capsys.readouterr().out
    )


# a single text, too few for hashes, enough
@pytest.mark.parametrize("documents", [1, 30, 300])
def test_what_a_run_validates_on_is_left_out(documents, tmp_path, capsys):
    rows = [
        f"{chr(97 + i % 26)}{chr(97 + i // 26)} {i} words\n"
        for i in range(documents * (1 if documents > 1 else 300))
    ]
    if documents == 1:
        (tmp_path / "a.txt").write_text("".join(rows))
    else:
        (tmp_path / "a.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in rows)
        )
    path = next(tmp_path.glob("a.*"))
    given = [
        "data=text",
        f"data.paths=[{path}]",
        "vocab_size=300",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    assert command([*given, f"out={tmp_path / 'x'}"]) == 0
    output = capsys.readouterr().out
    manifest = Manifest.load(
        prepare(TextSource((str(path),)), "byte", tmp_path / "cache", val_fraction=0.1)
    )
    sizes = {name: split.bytes for name, split in manifest.splits.items()}
    assert sum(sizes.values()) == sum(map(len, rows))
    assert f"from {sizes['train']:,} bytes of text" in output
    assert command([*given, "data.val_fraction=1", f"out={tmp_path / 'y'}"]) == 2
    assert "data.val_fraction=1.0: expected a number in" in capsys.readouterr().err


def test_bad_input_is_one_line(text, tmp_path, capsys):
    def said(*given):
        assert command([*given, f"data.cache_dir={tmp_path / 'cache'}"]) == 2
        return capsys.readouterr().err

    out = f"out={tmp_path / 'x'}"
    assert "expected 257" in said(*text, "vocab_size=200", out)
    nothing = ["data=text", f"data.paths=[{tmp_path / 'nothing'}]"]
    assert "nothing" in said(*nothing, "vocab_size=300", out)
    assert "did you mean vocab_size?" in said("vocab_sise=300", out)
    assert not (tmp_path / "x").exists()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "tokenizer.json").write_text("{}")
    assert "exists" in said(*text, "vocab_size=300", out)
