"""Word patterns by which tiktoken and Hugging Face's `tokenizers` split texts alike.

All match every character, so that no text is dropped, and in all of them the start of a
line is a token boundary (see `line_cuts`).
"""

import re

from tiktoken_ext.openai_public import (
    ENDOFPROMPT,
    ENDOFTEXT,
    FIM_MIDDLE,
    FIM_PREFIX,
    FIM_SUFFIX,
    r50k_pat_str,
)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

# In tiktoken's own spelling, since patterns are compared as texts.
GPT2 = r50k_pat_str
GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def gpt4o_pattern(contractions: str, digits: str) -> str:
    """Return GPT-4o's pattern, or one that differs in contractions and digits."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{begin}{UPPER}*{LOWER}+{contractions}|{begin}{UPPER}+{LOWER}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES_AND_SPACES}"
    )


def llama3_pattern(digits: str) -> str:
    """Return Llama 3's pattern, or one that differs in digits."""
    words = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    return rf"{words}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES_AND_SPACES}"


GPT4O = gpt4o_pattern(f"{CONTRACTIONS}?", r"\p{N}{1,3}")
LLAMA3 = llama3_pattern(r"\p{N}{1,3}")
QWEN2 = llama3_pattern(r"\p{N}")
MISTRAL = gpt4o_pattern("", r"\p{N}")
KNOWN_PATTERNS = (GPT2, GPT4, GPT4O, LLAMA3, QWEN2, MISTRAL)

# tiktoken's encodings: their patterns and special tokens. tiktoken has them only in
# functions that download the ranks.
ENCODINGS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (GPT2, {ENDOFTEXT: 50256}),
    "r50k_base": (GPT2, {ENDOFTEXT: 50256}),
    "p50k_base": (GPT2, {ENDOFTEXT: 50256}),
    "p50k_edit": (
        GPT2,
        {ENDOFTEXT: 50256, FIM_PREFIX: 50281, FIM_MIDDLE: 50282, FIM_SUFFIX: 50283},
    ),
    "cl100k_base": (
        GPT4,
        {
            ENDOFTEXT: 100257,
            FIM_PREFIX: 100258,
            FIM_MIDDLE: 100259,
            FIM_SUFFIX: 100260,
            ENDOFPROMPT: 100276,
        },
    ),
    "o200k_base": (GPT4O, {ENDOFTEXT: 199999, ENDOFPROMPT: 200018}),
}
# Numbers of their ordinary tokens: a .tiktoken file that was cut has fewer. p50k_base
# has 24 tokens for runs of spaces more than GPT-2, from the id 50257 on.
RANKS = {
    "gpt2": 50256,
    "r50k_base": 50256,
    "p50k_base": 50280,
    "p50k_edit": 50280,
    "cl100k_base": 100256,
    "o200k_base": 199998,
}


def to_hf_pattern(pattern: str) -> str:
    """Return a pattern in the spelling of tokenizer.json.

    Oniguruma, the engine of `tokenizers`, reads `{1,3}+` as a repetition of the
    repetition. tiktoken has it only at the end of an alternative, where the plus can be
    left out.
    """
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)


# Spelling in tokenizer.json -> tiktoken's spelling. With one spelling of a pattern,
# equal tokenizers have one fingerprint.
BY_HF_PATTERN = {to_hf_pattern(pattern): pattern for pattern in KNOWN_PATTERNS}
