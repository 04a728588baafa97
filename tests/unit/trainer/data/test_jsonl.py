"""JSON lines, and files of one JSON value, that a stranger wrote."""

import gzip
import tracemalloc

import pytest

from trainer.data import TextSource, prepare
from trainer.errors import UserError

FEW_BYTES = {
    "a row": '{"text":"some text","x":[%s0]}\n',
    "a list of rows": '[{"text":"some text","x":[%s0]},\n{"text":"text"}]\n',
    "an object with a list of rows": '{"rows":[{"text":"some text","x":[%s0]}]}\n',
}


@pytest.mark.parametrize("kind", FEW_BYTES)
@pytest.mark.parametrize("value", ['{"":{}},', "[" * 500 + "]" * 500 + ","])
def test_a_few_bytes_do_not_become_more_objects_than_there_is_memory(
    tmp_path, kind, value
):
    text = FEW_BYTES[kind] % (value * ((9 << 20) // len(value)))
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(text.encode()))
    assert file.stat().st_size < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"a\.jsonl.*more than 1,048,576 values"):
            prepare(TextSource((str(file),)), "byte", tmp_path / "data")
        assert tracemalloc.get_traced_memory()[1] < 10 * len(text)
    finally:
        tracemalloc.stop()
