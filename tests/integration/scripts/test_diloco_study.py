"""The study of DiLoCo at toy size: what narrow outer gradients cost in loss, and the
figures it writes."""

import pytest

from scripts.studies import diloco, rows
from trainer.cli.arguments import read

TINY = "model.n_layer=1 model.d_model=32 model.n_head=2 model.context=32"


@pytest.mark.slow  # two runs of eight replicas; their training: test_replicas.py
def test_clients_that_send_fp8_lose_next_to_nothing_against_fp32_at_a_quarter_of_the_bytes(
    tmp_path, monkeypatch, capsys
):
    """Eight of which three train in a round, from a warm start."""
    monkeypatch.chdir(tmp_path)
    base, way = (
        "sync_every=3+participants=3+outer_grad=fp32",
        "sync_every=3+participants=3",
    )
    texts = [
        "out=A",
        "replicas=8",
        "seeds=1",
        "steps=18",
        "warm=6",
        "batch_tokens=512",
        "eval_batches=2",
    ]
    args = read(
        diloco.Arguments,
        [
            *texts,
            f"base={base}",
            f"ways={way}",
            f"overrides={TINY} data.val_fraction=0.01",
        ],
    )
    diloco.main(args)
    wide, narrow = rows.read(tmp_path / "A" / "runs.jsonl")
    assert (wide["way"], narrow["way"]) == (base, way)
    assert narrow["fewer"] / wide["fewer"] > 3.9
    assert wide["fewer"] == 3
    assert narrow["loss"] != wide["loss"]
    assert abs(narrow["loss"] / wide["loss"] - 1) < 0.003
    table = (tmp_path / "A" / "table.md").read_text()
    assert f"| {base} | 1 | {wide['loss']:.4f} | - |" in table
    assert (
        "18 steps of 512 tokens, 6 of them data parallel; validation loss in nats,"
        f" differences to `{base}`" in table
    )
    capsys.readouterr()
    diloco.main(args)  # all is there
    assert capsys.readouterr().out == table + "\n"


def test_clients_have_consecutive_parts_of_two_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(diloco, "MOST", 4000)
    paths = diloco.texts_apart(tmp_path, 4)
    assert [path.name for path in paths] == [
        "bible0.txt",
        "bible1.txt",
        "python2.txt",
        "python3.txt",
    ]
    texts = [path.read_text() for path in paths]
    assert [len(text) for text in texts] == [2000] * 4
    assert texts[0].startswith("In the beginning God created")
    assert "import" in texts[2] + texts[3]
    assert diloco.texts_apart(tmp_path, 4) == paths
