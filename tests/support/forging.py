"""Other data of the same CRC-32, as anybody can make them."""

import zlib
from collections.abc import Sequence


def same_crc32(data: bytes, positions: Sequence[int]) -> bytes:
    """Return data of the same size and CRC-32, in which the lowest bit of some of the
    bytes at 33 or more `positions` is flipped.

    Flips change a CRC-32 independently of each other, and 33 changes of 32 bits are
    linearly dependent.
    """
    basis: dict[int, tuple[int, set[int]]] = {}
    for position in positions:
        change = zlib.crc32(flipped(data, {position})) ^ zlib.crc32(data)
        flips = {position}
        while change and change.bit_length() in basis:
            other_change, other_flips = basis[change.bit_length()]
            change ^= other_change
            flips ^= other_flips
        if not change:
            forged = flipped(data, flips)
            assert forged != data
            assert zlib.crc32(forged) == zlib.crc32(data)
            return forged
        basis[change.bit_length()] = change, flips
    raise ValueError("too few positions")


def flipped(data: bytes, positions: set[int]) -> bytes:
    """Return data with the lowest bit of the bytes at these positions flipped."""
    changed = bytearray(data)
    for position in positions:
        changed[position] ^= 1
    return bytes(changed)
