"""The index of a checkpoint's arrays is bounded before TensorStore decodes it."""

import pytest
import tensorstore

from trainer.files import TEXT_BYTES
from trainer.run.ocdbt import MANIFEST, IndexTooLargeError, check_index

KEYS = 3000


def write(folder, keys, **config):
    """Write keys without values in one version of an index."""
    base = {"driver": "file", "path": f"{folder}/"}
    spec = {"driver": "ocdbt", "base": base, "config": config}
    store = tensorstore.KvStore.open(spec).result()
    with tensorstore.Transaction() as transaction:
        writer = store.with_transaction(transaction)
        for key in keys:
            writer[key] = b""


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}])
def test_all_nodes_of_an_index_count(tmp_path, compression):
    keys = [f"params/layer_{i}/.zarray" for i in range(KEYS)]
    write(tmp_path, keys, max_decoded_node_bytes=2000, compression=compression)
    check_index(tmp_path, KEYS * 250)
    with pytest.raises(IndexTooLargeError):
        check_index(tmp_path, KEYS * 128)


def test_a_few_bytes_of_index_do_not_become_more_keys_than_there_is_memory(tmp_path):
    keys = [f"w/{'0' * 60_000}{i}" for i in range(1200)]
    write(tmp_path, keys, max_decoded_node_bytes=2**30)
    assert size_of(tmp_path) < 20_000
    with pytest.raises(IndexTooLargeError):
        check_index(tmp_path, TEXT_BYTES)


def test_an_index_of_many_bytes_that_are_compressed_is_not_decompressed_whole(tmp_path):
    config = {"max_decoded_node_bytes": 2**30, "max_inline_value_bytes": 2**20}
    base = {"driver": "file", "path": f"{tmp_path}/"}
    spec = {"driver": "ocdbt", "base": base, "config": config}
    store = tensorstore.KvStore.open(spec).result()
    with tensorstore.Transaction() as transaction:
        for i in range(4):
            store.with_transaction(transaction)[f"w/{i}"] = bytes(2**20)
    assert size_of(tmp_path) < 2000
    with pytest.raises(IndexTooLargeError):
        check_index(tmp_path, 10**6)


def test_an_index_without_keys_and_one_of_several_versions_are_read(tmp_path):
    for i in range(20):
        write(tmp_path, [f"w/{i}"])
    check_index(tmp_path, 10**5)
    empty = tmp_path / "empty"
    write(empty, ["w/0"])
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": {"driver": "file", "path": f"{empty}/"}}
    ).result()
    store.delete_range(tensorstore.KvStore.KeyRange()).result()
    check_index(empty, 10**5)


@pytest.mark.parametrize("name", [MANIFEST, "d/*"])
def test_a_damaged_index_is_an_error_and_does_not_keep_the_reader_busy(tmp_path, name):
    write(tmp_path, [f"w/{i}" for i in range(9)], compression=None)
    [file] = tmp_path.glob(name)
    data = file.read_bytes()
    for place in range(len(data)):
        for value in (0x00, 0x7F, 0xFF):
            file.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            try:
                check_index(tmp_path, 10**6)
            except (ValueError, IndexError, OSError, IndexTooLargeError):
                continue
        file.write_bytes(data[:place])
        with pytest.raises((ValueError, OSError)):
            check_index(tmp_path, 10**6)
