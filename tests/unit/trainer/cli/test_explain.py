from trainer.cli.explain import blocks_text
from trainer.precision.blocks import BLOCK_FIGURES


def test_operands_whose_blocks_are_lost_come_before_those_whose_scales_spread():
    figures = {
        "weights/a": (3.0, 0.0, 0.0),
        "weights/b": (0.5, 0.01, 0.0),
        "weights/c": (1.0, 0.0, 0.25),
    }
    blocks = {
        tensor: dict(zip(BLOCK_FIGURES, values, strict=True))
        for tensor, values in figures.items()
    }
    first, _, _, *rows = blocks_text(blocks, top=2).splitlines()
    assert first.startswith("blocks of 3 operands")
    assert [row.split() for row in rows] == [
        ["weights/c", "1.00", "0.00%", "25.00%"],
        ["weights/b", "0.50", "1.00%", "0.00%"],
    ]
