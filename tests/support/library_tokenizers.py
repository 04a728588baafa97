"""Tokenizers of Llama's and SentencePiece's kinds, made by Hugging Face's library, and
files of tiktoken."""

import json

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from trainer.data.byte_spelling import SPELLING
from trainer.data.tokenizer import tiktoken_file

END = "<|endoftext|>"
BYTES = {bytes([i]): i for i in range(256)}
WORDS = [
    "In the beginning God created the heaven and the earth.",
    "And the earth was without form, and void;",
] * 20


def write_tiktoken(path, pattern, tokens=BYTES, **special_tokens):
    """Write a .tiktoken file, and beside it the JSON file with its word pattern."""
    path.write_bytes(tiktoken_file(tokens))
    special = special_tokens or {"<|endoftext|>": 1 + max(tokens.values())}
    settings = {"pat_str": pattern, "special_tokens": special}
    path.with_suffix(".json").write_text(json.dumps(settings))
    return path


def saved(folder, model, *, special=(END,), words=(), **parts):
    """Write the tokenizer.json of a model, and return the library's tokenizer."""
    made = Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens(list(special))
    made.add_tokens(list(words))
    made.save(str(folder / "tokenizer.json"))
    return made


def byte_level(prefix=False, of_bytes=range(256)):
    """Return the parts of a byte-level encoding without merges, with these bytes."""
    letters = [SPELLING[byte] for byte in of_bytes]
    return {
        "model": models.BPE({char: i for i, char in enumerate(letters)}, []),
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=prefix),
    }


def llama2():
    """Byte-pair encoding of SentencePiece: a space in front, spaces as U+2581, bytes
    for what has no token."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    made.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*special, *bytes_], show_progress=False
    )
    made.train_from_iterator(WORDS, trainer)
    tree = json.loads(made.to_str())
    # bytes are ordinary tokens, as Llama's are
    tree["added_tokens"] = tree["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(tree))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made


def llama3():
    """Byte-level, with another end than GPT-2's, and a token in front of each text."""
    made = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(r"\p{L}+| ?[^\s\p{L}]+|\s+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    start = made.token_to_id("<|begin_of_text|>")
    made.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", start)]
    )
    return made


def unigram():
    """SentencePiece's other kind: pieces with probabilities."""
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = ["<unk>", "</s>"]
    made.train_from_iterator(
        WORDS,
        trainers.UnigramTrainer(
            vocab_size=80,
            special_tokens=special,
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return made


KINDS = {
    "llama2": (llama2, "</s>"),
    "llama3": (llama3, "<|end_of_text|>"),
    "unigram": (unigram, "</s>"),
}
