from scripts.studies import out_of_the_box
from scripts.studies.out_of_the_box import Arguments, ZooTrial, main

MODELS = "vit:1,llama:2"


def losses(job, args):
    """What a run would have given; the FP8 run of seed 1 diverges."""
    if job == ZooTrial("vit:1", 1, "fp8"):
        return [2.0] * (args.steps - 1) + [float("nan")]
    return [5.0] * (args.steps - args.last) + [
        1.0 + 0.01 * (job.way == "fp8") * (1 + job.seed)
    ] * args.last


def test_a_study_continues_where_it_was_and_pairs_seeds(monkeypatch, tmp_path, capsys):
    trained = []
    monkeypatch.setattr(
        out_of_the_box,
        "train",
        lambda job, args: trained.append(job) or losses(job, args),
    )
    main(Arguments(out=str(tmp_path), models="llama:2", seeds=1))
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"model": "vit:1", "se')  # killed while it wrote
    main(Arguments(out=str(tmp_path), models=MODELS, seeds=2))
    assert len(trained) == len(set(trained)) == 8
    main(Arguments(out=str(tmp_path), models=MODELS, seeds=2))
    assert len(trained) == 8
    table = (tmp_path / "table.md").read_text()
    assert "| llama:2 | fp8 | 2 | 0 | 1.0000 | 1.0150 | +1.50 ± 6.35 | +7.85 |" in table
    assert "| vit:1 | fp8 | 1 | 1 | 1.0000 | 1.0100 | +1.00 | - |" in table
