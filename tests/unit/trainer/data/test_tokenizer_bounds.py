"""A tokenizer of somebody else neither multiplies a text nor searches it for ever."""

import base64
import itertools
import json
import random
import time

import pytest
from library_tokenizers import saved, write_tiktoken
from tokenizers import Regex, models, normalizers, pre_tokenizers

from trainer.data import get_tokenizer
from trainer.data.bpe_files import last_parts, merges_follow_ids, merges_of
from trainer.data.tokenizer_bounds import (
    check_growth_and_patterns,
    check_pattern_speed,
)
from trainer.data.word_patterns import KNOWN_PATTERNS, to_hf_pattern
from trainer.errors import UserError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# of the tokenizers that people use most; GPT-2's and its like are tiktoken's own
KNOWN = {
    "Llama 3": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}",
    "Qwen": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}",
    "Mistral": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|{REST}",
    "DeepSeek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+(?!\S)|\s+",
    "Kimi": rf"[\p{{Han}}]+|{UPPER[:-1]}&&[^\p{{Han}}]]*{LOWER}+{CONTRACTIONS}?",
    "Falcon": r"[\p{P}\$\+<=>\^~\|`]+",
    "BLOOM": r" ?[^(\s|[.,!?])]+",
    "digits from the right": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    "EXAONE": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
    rf"|\p{{N}}|{REST}",
    "spaces": " {2,}",
}
SLOW = [
    r"(a+)+b",
    r"(a|a)+b",
    r"(a|aa){2,}$",
    r"(?:a?){30}a{30}",
    r"(?:(?:x+)y?)*z",
    r"([a-c]+[\]x]*)+$",
    r"(?=(a+)+b)",
    r"(?x)(a+) +b",
    r"a{1,3}+b",
    "a?" * 30 + "a" * 30,
    ".*.*.*.*x",
    r"(a)\1+",
    r"(?<n>a\g<n>?b)*",
    r"(?:a{100}){100}",
    r"((?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+)+",
    "(" * 30 + "a" + ")" * 30,
    "x" * 5000,
]


@pytest.mark.parametrize("name", KNOWN)
def test_patterns_of_known_tokenizers_are_accepted(tmp_path, name):
    check_pattern_speed(tmp_path, KNOWN[name])
    Regex(KNOWN[name])  # it is one


def test_the_known_patterns_are_accepted(tmp_path):
    for pattern in KNOWN_PATTERNS:
        check_pattern_speed(tmp_path, pattern)
        check_pattern_speed(tmp_path, to_hf_pattern(pattern))


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_may_take_exponential_time_are_refused(tmp_path, pattern):
    with pytest.raises(UserError, match="and may search for ever"):
        check_pattern_speed(tmp_path, pattern)


def save(folder, **parts):
    saved(folder, models.WordLevel({"a": 0}, unk_token="a"), **parts)
    return str(folder)


def test_a_tokenizer_whose_pattern_burns_is_refused_when_it_is_read(tmp_path):
    words = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    path = write_tiktoken(tmp_path / "a.tiktoken", "(a+)+b")
    for name in (save(tmp_path, pre_tokenizer=words), str(path)):
        with pytest.raises(UserError, match=r"\(a\+\)\+.* may search for ever"):
            get_tokenizer(name)


@pytest.mark.parametrize(
    "parts",
    [
        [normalizers.Replace("a", "b" * 1000)],
        [normalizers.Prepend("x" * 100)],
        *(
            # Each of these doubles a text.
            [normalizers.Replace(pattern, "aa")] * 7
            for pattern in (
                "a", "", Regex(""), Regex("(?=.)"), Regex("b*"), Regex("b{0,2}"),
                Regex(r"\A|c"),
            )
        ),
    ],
)  # fmt: skip
def test_normalizers_that_multiply_a_text_are_refused(tmp_path, parts):
    with pytest.raises(UserError, match="replaces a character by up to"):
        get_tokenizer(save(tmp_path, normalizer=normalizers.Sequence(parts)))


# the longest of Unicode's own forms, that of U+FDFA
LONGEST = "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647"
LONGEST += " \u0648\u0633\u0644\u0645"


def charsmap_of(longest):
    table = (8).to_bytes(4, "little") + b"12345678" + b"x\0" + longest + b"\0"
    return base64.b64encode(table).decode()


def charsmap(content):
    return {"type": "Precompiled", "precompiled_charsmap": charsmap_of(content)}


def test_normalizers_of_transformers_converters_are_accepted(tmp_path):
    assert (len(LONGEST), len(LONGEST.encode())) == (18, 33)
    replacements = [(" {2,}", "\u2581"), (r"\A +| +\z", ""), (" {2,}", " ")]
    replacements.append((r"\A\u2581", "\u2581\u2581"))
    parts = [
        {"type": "Replace", "pattern": {"Regex": regex}, "content": content}
        for regex, content in replacements
    ]
    table = charsmap(LONGEST.encode())
    for some in (parts[:1], parts[1:]):
        check_growth_and_patterns(
            tmp_path, {"normalizer": {"normalizers": [table, *some]}}
        )


def test_a_table_of_normal_forms_has_no_long_ones(tmp_path):
    check_growth_and_patterns(tmp_path, {"normalizer": charsmap(b"y" * 33)})
    with pytest.raises(UserError, match="by up to 1,000 others"):
        check_growth_and_patterns(tmp_path, {"normalizer": charsmap(b"y" * 1000)})


def test_long_tokens_are_left_to_the_library_whose_time_does_not_grow_with_a_square():
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"a" * 2**n for n in range(1, 15)]
    merges = [(b"a" * 2**n,) * 2 for n in range(14)]
    started = time.process_time()
    assert not merges_follow_ids({t: i for i, t in enumerate(tokens)}, merges)
    assert time.process_time() - started < 5
    short = {t: i for i, t in enumerate(tokens) if len(t) <= 64}
    assert merges_follow_ids(short, merges[:6])


def parts_by_looking_at_all_pairs(token, rank, ranks):
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
        i = pairs.index(min(pairs))
        if pairs[i] >= rank:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def test_the_parts_of_a_token_are_merged_as_if_all_pairs_were_looked_at():
    rng = random.Random(0)
    for _ in range(300):
        tokens = {bytes(rng.choices(b"abc", k=rng.randint(1, 9))) for _ in range(60)}
        # also ids that are not distinct
        ranks = {token: rng.randint(0, 80) for token in sorted(tokens)}
        for token, rank in ranks.items():
            expected = parts_by_looking_at_all_pairs(token, rank, ranks)
            assert last_parts(token, rank, ranks) == expected


def test_the_merges_of_a_token_are_found_without_a_look_at_all_pairs_each_time():
    class Counted(dict):
        looks = 0

        def get(self, key, default=None):
            self.looks += 1
            return super().get(key, default)

    size = 1023
    ranks = Counted({bytes([byte]): byte for byte in range(256)})
    for n in range(1, 10):
        ranks[b"a" * 2**n] = len(ranks)
    token = b"a" * (size - 1) + b"b"
    ranks[token] = len(ranks)
    assert len(merges_of(ranks)) == 9
    assert ranks.looks < 10 * size


def test_a_word_of_which_the_normalizer_leaves_nothing_is_refused(tmp_path):
    """The library found it everywhere, and took all memory."""
    word = {"id": 2, "content": "\u00ad", "special": False, "normalized": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    saved(
        tmp_path,
        models.WordLevel({"<|endoftext|>": 0, "a": 1}, "a"),
        normalizer=normalizers.Replace("\u00ad", ""),
    )
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["added_tokens"].append(word | flags)
    file.write_text(json.dumps(tree))
    with pytest.raises(UserError, match="leaves nothing of the added word"):
        get_tokenizer(str(tmp_path))
