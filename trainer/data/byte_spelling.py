"""GPT-2's spelling of bytes as printable characters, as tokenizer.json has it."""

# Python calls a character printable by Unicode's categories: the soft hyphen, 0xAD, is
# not, and GPT-2 spells it by a character above U+0100, too.
_PRINTABLE = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
SPELLING = {b: chr(b) for b in _PRINTABLE} | {
    b: chr(256 + i) for i, b in enumerate(_OTHERS)
}  # GPT-2's ids are in this order.
_BYTES = {char: byte for byte, char in SPELLING.items()}
# The pre-tokenizer and the decoder of a tokenizer.json. Words are made by the Split in
# front of it, if there is one.
BYTE_LEVEL = {
    "type": "ByteLevel",
    # The library's own default is true: a space before each text.
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def spell(token: bytes) -> str:
    """Return the characters that stand for bytes."""
    return "".join(SPELLING[byte] for byte in token)


def unspell(token: str) -> bytes | None:
    """Return the bytes that GPT-2 spells as `token`.

    None: some character spells no byte.
    """
    if all(char in _BYTES for char in token):
        return bytes(_BYTES[char] for char in token)
    return None
