"""A bound of what TensorStore decodes of the index of a checkpoint's arrays.

In OCDBT a tree of nodes maps keys to values. A node is compressed by zstd, and has of
each key only its difference from the one before, so a kilobyte can stand for gigabytes
of keys. TensorStore decodes whole nodes, whatever is read. Here the sizes of all nodes
are added up before it reads any.

Format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

from pathlib import Path
from typing import NamedTuple

from trainer.files import read_file

MANIFEST = "manifest.ocdbt"
MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
NODE_MAGIC = bytes.fromhex("0cdb20de")
# A CRC-32C ends each manifest and node. It is not compared here: TensorStore does so.
CHECKSUM_BYTES = 4
ENTRY_BYTES = 128  # that TensorStore takes for a key or a file, beside its name
MAX_ENTRIES = 1 << 20  # of a node or a manifest, as in TensorStore
NO_ROOT = 2**64 - 1  # the length of the root of a tree without keys


class Node(NamedTuple):
    """The place of a node.

    Attributes:
      directory: prefix of the paths of the files that the node refers to.
      file: path of its own file.
      offset: its first byte in the file.
      length: number of its bytes.
    """

    directory: str
    file: str
    offset: int
    length: int


class IndexTooLargeError(Exception):
    """An index that takes more memory than it may: a stranger's, or a damaged one."""


class Budget:
    """The bytes of memory that an index may still take."""

    def __init__(self, size: int) -> None:
        self.left = size

    def spend(self, size: int) -> None:
        """Count some bytes; raise IndexTooLargeError if they are too many."""
        self.left -= size
        if self.left < 0:
            raise IndexTooLargeError


class NodeReader:
    """Reads the fields of a manifest or a node, one after another.

    Args:
      data: the bytes of the manifest or node.
      magic: the first of them.
      budget: the memory that they may still take when they are decoded.

    Raises:
      ValueError: the bytes are damaged; methods raise it, too.
    """

    def __init__(self, data: bytes, magic: bytes, budget: Budget) -> None:
        self._budget, self._data, self._position = budget, data, 0
        # The length of the whole stands in the header, so bytes that were added are
        # noticed.
        if self.take(4) != magic or int.from_bytes(self.take(8), "little") != len(data):
            raise ValueError("no node")
        if self.number() != 0:
            raise ValueError("another version")
        is_compressed = self.number() != 0
        body = data[self._position : -CHECKSUM_BYTES]
        if is_compressed:
            import pyarrow

            with pyarrow.input_stream(pyarrow.BufferReader(body), "zstd") as stream:
                # One byte more than may be spent, so that too much is noticed and no
                # more is decoded.
                body = stream.read(budget.left + 1)
        budget.spend(len(body))
        self._data, self._position = body, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        start, self._position = self._position, self._position + count
        # A slice beyond the end would be short, without an error.
        if self._position > len(self._data):
            raise ValueError("cut off")
        return self._data[start : self._position]

    def number(self) -> int:
        """Return the next number: 7 bits a byte, the lowest first."""
        result = 0
        # Ten bytes hold 64 bits; an endless number would keep the reader busy.
        for shift in range(0, 70, 7):
            [byte] = self.take(1)
            result |= (byte & 127) << shift
            if byte < 128:
                return result
        raise ValueError("a number of more than 64 bits")

    def numbers(self, count: int) -> list[int]:
        """Return the next numbers."""
        # Before a list of that length is made.
        if count > MAX_ENTRIES:
            raise ValueError("too many numbers")
        return [self.number() for _ in range(count)]

    def name_lengths(self, count: int) -> tuple[list[int], list[int]]:
        """Return the length of what each name shares with the one before, and of the
        rest of it.
        """
        # The first name shares nothing, and has no number. No names: the list is cut to
        # none.
        shared = [0, *self.numbers(count - 1)][:count]
        rest = self.numbers(count)
        # A name takes its whole length in memory, but only the rest of it in the file.
        self._budget.spend(sum(shared) + sum(rest) + ENTRY_BYTES * count)
        return shared, rest

    def files(self, directory: str) -> list[tuple[str, str]]:
        """Return `Node.directory` and `Node.file` of the nodes in each file that a node
        refers to.

        `directory`: that of the node.
        """
        shared, rest = self.name_lengths(self.number())
        directory_lengths = self.numbers(len(rest))
        files, name = [], b""
        for same, new, length in zip(shared, rest, directory_lengths, strict=True):
            name = name[:same] + self.take(new)
            prefix = name[:length].decode()
            files.append((directory + prefix, directory + name.decode()))
        return files

    def nodes(self, count: int, files: list[tuple[str, str]]) -> list[Node]:
        """Return the nodes that a node refers to."""
        numbers, offsets, lengths = (self.numbers(count) for _ in range(3))
        return [
            Node(*files[number], offset, length)
            for number, offset, length in zip(numbers, offsets, lengths, strict=True)
            if length != NO_ROOT
        ]


def check_index(folder: Path, max_bytes: int) -> None:
    """Check that TensorStore expands an index to at most `max_bytes`.

    Args:
      folder: that of a checkpoint's arrays.
      max_bytes: bound on the memory of all nodes of the index.

    Raises:
      IndexTooLargeError: the index takes more.
      Exception: of any class, if the files are damaged.
    """
    budget = Budget(max_bytes)
    nodes = _roots(NodeReader(read_file(folder / MANIFEST), MANIFEST_MAGIC, budget))
    # A node that several nodes refer to is decoded once.
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        file_path = folder / node.file
        # Otherwise `read` would allocate whatever length the node says.
        if node.offset + node.length > file_path.stat().st_size:
            raise ValueError("a node beyond its file")
        with file_path.open("rb") as file:
            file.seek(node.offset)
            data = file.read(node.length)
        below = _children(NodeReader(data, NODE_MAGIC, budget), node.directory)
        # Nodes may refer to each other in a circle.
        nodes += set(below) - seen
        seen.update(below)


def _roots(manifest: NodeReader) -> list[Node]:
    """Return the root of the newest version; none if it has no keys."""
    manifest.take(16)  # uuid
    if manifest.number() != 0:
        raise ValueError("the versions are in other files")
    manifest.numbers(2)  # max_inline_value_bytes, max_decoded_node_bytes
    manifest.take(1)  # version_tree_arity_log2
    if manifest.number() != 0:
        manifest.take(4)  # the level of compression
    files = manifest.files("")
    versions = manifest.number()
    manifest.numbers(versions)  # generation_number
    manifest.take(versions)  # root_height
    # Orbax reads the newest version.
    return manifest.nodes(versions, files)[-1:]


def _children(node: NodeReader, directory: str) -> list[Node]:
    """Return the nodes that a node refers to; none if it has the values."""
    [height] = node.take(1)
    files = node.files(directory)
    count = node.number()
    _, rest = node.name_lengths(count)
    if height == 0:
        return []
    node.numbers(count)
    node.take(sum(rest))
    return node.nodes(count, files)
