import pytest

from scripts.studies import zoo
from scripts.studies.zoo import Arguments, main

GOOD = {
    "fits": True,
    "leaves": 3,
    "failures": 0,
    "error": 0.001,
    "plain": 0.002,
    "zeros": 0.0,
    "most_zeros": 0.0,
}


@pytest.fixture
def measured(monkeypatch):
    """What is measured is noted, and always the same."""
    requests = []
    monkeypatch.setattr(zoo, "Subject", lambda name, depth, width: name)
    monkeypatch.setattr(zoo, "figures", lambda actual: dict(GOOD))
    monkeypatch.setattr(zoo, "measure", lambda *args: requests.append(args))
    return requests


def test_a_table_continues_where_it_was(measured, tmp_path, capsys):
    out = tmp_path / "zoo.md"
    main(
        Arguments(
            out=str(out),
            models="llama,mamba",
            formats="fp16",
            scales="static",
            rounds=0,
        )
    )
    with out.with_suffix(".jsonl").open("a") as file:
        file.write('{"model": "lst')  # killed while it wrote
    main(
        Arguments(
            out=str(out),
            models="llama,mamba",
            formats="fp16,fp8",
            scales="static",
            rounds=0,
        )
    )
    assert measured == [
        ("llama", "fp16", "static"),
        ("mamba", "fp16", "static"),
        ("llama", "fp8", "static"),
    ]
    table = out.read_text()
    assert "| llama | 0.001 / 0.002 | 0.001 / 0.002 | - | - | - | - | fits |" in table
    assert "| mamba | 0.001 / 0.002 | - | - | - | - | - | fits |" in table
