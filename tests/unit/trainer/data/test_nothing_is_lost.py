"""No text is left out, ends another or loses a character without a word."""

import errno
import gzip
import json
import os
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import directories_as_hub, documents_of, prepared, read, rows, write
from library_tokenizers import END, byte_level, saved
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from trainer.cli.prepare_data import describe
from trainer.data import HubSource, TextSource, get_tokenizer
from trainer.data.byte_spelling import SPELLING
from trainer.data.compressed import decompressed
from trainer.data.corpus import open_corpus
from trainer.data.files import expand
from trainer.data.json_tokenizer import NoToken
from trainer.data.preparation import SEARCHED, note_special_tokens
from trainer.data.tokenizer import TRIED, changed_characters
from trainer.errors import UserError

LETTERS = {letter: i for i, letter in enumerate("abcdefghij")}
CONFIG = "tokenizer_config.json"


def letters(**parts):
    """Letters in byte-pair encoding, whose token for all else is that of `a`."""
    return {"model": models.BPE(LETTERS, [], unk_token="a"), **parts}


def pair(folder, end=END):
    """Write the files of a byte-level encoding with one merge."""
    ids = {"<s>": 0, end: 1}
    ids |= {char: i for i, char in enumerate(SPELLING.values(), 2)}
    files = {"vocab.json": json.dumps(ids | {"ab": 258})}
    write(folder, files | {"merges.txt": "#version: 0.2\na b\n"})


def test_a_link_that_leads_nowhere_is_no_text_less(tmp_path):
    """An unfinished download, or a disk that is not mounted."""
    folder = write(tmp_path / "texts", {"a.txt": "a", "more/b.txt": "b"})
    (folder / ".#a.txt").symlink_to("me@machine.1")  # an editor's lock
    assert len(expand((str(folder),))) == 2
    (folder / "more" / "c.txt").symlink_to("../../blobs/c")
    for paths in (folder, folder / "more" / "*.txt", folder / "more" / "c.txt"):
        with pytest.raises(
            UserError, match=r"c\.txt is a link to .*/blobs/c, where no"
        ):
            expand((str(paths),))


@pytest.mark.parametrize("pattern", ["", "**", "**/*.txt", "*/*.txt", "*/b.txt"])
def test_texts_in_a_directory_that_cannot_be_listed_are_not_left_out(
    tmp_path, monkeypatch, pattern
):
    folder = write(tmp_path / "texts", {"a.txt": "a", "closed/b.txt": "b"})
    path = str(folder / pattern)
    assert folder / "closed" / "b.txt" in expand((path,))
    fail_to_list(monkeypatch, "closed")
    message = r"closed cannot be listed \(Input/output error\), so that its files would"
    with pytest.raises(UserError, match=message):
        expand((path,))
    assert expand((str(folder / "*.txt"),)) == [folder / "a.txt"]
    (folder / "closed").rename(folder / ".closed")  # hidden ones are not read
    assert expand((str(folder),)) == [folder / "a.txt"]


def fail_to_list(monkeypatch, name):
    """Let the disk fail at a directory, which glob and os.walk take for an empty one."""
    scandir = os.scandir

    def failing(path="."):
        if str(path).rstrip("/").endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)


def test_a_text_whose_directory_is_spelled_in_two_ways_is_not_read_twice(tmp_path):
    folder = write(tmp_path / "texts", {"a.txt": "a", "a.txt.gz": gzip.compress(b"a")})
    (tmp_path / "link").symlink_to(folder)
    source = TextSource((str(folder / "a.txt"), str(tmp_path / "link" / "a.txt.gz")))
    with pytest.raises(UserError, match=r"a\.txt\.gz has the content of .*read twice"):
        open_corpus(source, tmp_path / "cache")


@pytest.mark.parametrize("use_dictionary", [False, True])
def test_zeros_in_the_place_of_texts_are_damage_in_parquet_too(
    tmp_path, monkeypatch, use_dictionary
):
    """Where a download was interrupted. A compressed page notices it."""
    folder = write(tmp_path / "set", {"a.parquet": "made anew"})
    texts = [f"text {i} {'word ' * 40}" for i in range(100)]
    settings = {"compression": "none", "use_dictionary": use_dictionary}
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", **settings)
    content = bytearray((folder / "a.parquet").read_bytes())
    content[3000:7000] = bytes(4000)
    (folder / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: .*(damaged|cannot be read as)"):
        read(TextSource((str(folder),)), tmp_path / "cache")
    directories_as_hub(monkeypatch, tmp_path / "hf")
    with pytest.raises(UserError, match="a text holds zeros, as where a file was dama"):
        read(HubSource(str(folder)), tmp_path / "cache")


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl.gz", "b.txt.zst"])
def test_a_file_without_bytes_is_none_of_these_formats(tmp_path, name):
    folder = write(tmp_path / "texts", {"a.jsonl": rows("a"), name: b""})
    message = rf"{name}.*(size is 0 bytes|no (gzip|zstd) file: it has no bytes)"
    with pytest.raises(UserError, match=message):
        read(TextSource((str(folder),)), tmp_path / "cache")


def test_a_decompressed_text_under_the_key_of_another_is_made_anew(tmp_path):
    def text_of(name):
        return decompressed(tmp_path / name / "x.txt.gz", tmp_path / "cache")

    for name in "ab":
        write(tmp_path / name, {"x.txt.gz": gzip.compress(name.encode())})
    a, b = map(text_of, "ab")
    a.parent.rename(tmp_path / "moved")
    b.parent.rename(a.parent)
    assert text_of("a").read_text() == "a"


@pytest.mark.parametrize("kind", ["text", "hub"])
def test_a_letter_that_the_disk_changed_in_parquet_is_found(
    tmp_path, monkeypatch, kind
):
    """Where the file has checksums of its pages, as of Spark and parquet-mr."""
    directories_as_hub(monkeypatch, tmp_path / "hf")
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / "a.parquet"
    pq.write_table(
        pa.table({"text": ["first", "second", "third"]}),
        path,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    source = TextSource((str(path),)) if kind == "text" else HubSource(str(path.parent))
    assert read(source, tmp_path) == ["first", "second", "third"]
    path.write_bytes(path.read_bytes().replace(b"second", b"recond"))
    with pytest.raises(UserError, match="could not verify page integrity"):
        read(source, tmp_path)


def test_files_of_one_content_are_said(tmp_path, capsys):
    """Copies or hard links, of which one may be trained on and another validated on."""
    files = dict.fromkeys(("a.txt", "b.txt", "c.txt"), "a") | {"d.txt": "", "e.txt": ""}
    read(TextSource((str(write(tmp_path / "texts", files)),)), tmp_path)
    line = "b.txt has the content of {}/a.txt (2 such files), which is read twice"
    assert line.format(tmp_path / "texts") in capsys.readouterr().err


def test_a_nul_in_a_text_ends_no_document(tmp_path):
    write(tmp_path, {"a.jsonl": rows(f"{i} left\0right" for i in range(99))})
    source = TextSource((str(tmp_path / "a.jsonl"),))
    assert len(documents_of(prepared(source, tmp_path / "cache"))) == 99
    byte = get_tokenizer("byte")
    assert byte.decode(byte.encode("a\0b")) == "a\ufffdb"


# As the library trains one without being given the alphabet of all bytes, with the
# bytes of a combining accent.
SOME_BYTES = byte_level(of_bytes=[*b"abcdefghij\xc3", *"\u0301".encode()])
EACH_BYTE = {char: i for i, char in enumerate(SPELLING.values())}


def with_marks(mark, **settings):
    """All bytes, of which only ASCII has tokens with a mark, such as ##a or a</w>."""
    marked = {mark.format(chr(i)): 256 + i for i in range(33, 127)}
    return byte_level() | {"model": models.BPE(EACH_BYTE | marked, [], **settings)}


WITHOUT = {
    "byte level": SOME_BYTES,
    "inside a word": with_marks("##{}", continuing_subword_prefix="##"),
    "at its end": with_marks("{}</w>", end_of_word_suffix="</w>"),
    "composed": SOME_BYTES | {"normalizer": normalizers.NFC()},
    "unigram": {"model": models.Unigram([(letter, -1.0) for letter in LETTERS])},
    "words": {
        "model": models.WordLevel(LETTERS),
        "pre_tokenizer": pre_tokenizers.Split("", "isolated"),
    },
    "word pieces": {
        "model": models.WordPiece(LETTERS | {"##a": 10, "##f": 11}),
        "pre_tokenizer": pre_tokenizers.Whitespace(),
    },
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_character_without_a_token_is_refused_and_others_are_not(tmp_path, kind):
    saved(tmp_path, **WITHOUT[kind])
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.encode_array("eaf").tolist() == tokenizer.encode("eaf") != []
    text = "eae\u0301f" if kind == "composed" else "eaéf"
    what = r"('é'|'\u0301') \(U\+0[03]|a word of a text of . characters"
    message = rf"no token for ({what}).* vanish from a text; train"
    for encode in (tokenizer.encode, tokenizer.encode_array):
        with pytest.raises(NoToken, match=message) as refusal:
            encode(text)
        assert text not in str(refusal.value)
    if kind == "byte level":
        assert tokenizer.encode("e\u0301")


NO_UNKNOWN = r"no token for characters outside of its vocabulary, .*; train it with an"


@pytest.mark.parametrize(
    ("vocabulary", "settings", "message"),
    [
        # byte-pair encoding would leave other characters out of a text
        (LETTERS, {}, NO_UNKNOWN),
        (LETTERS, {"unk_token": "<unk>"}, NO_UNKNOWN),  # a name without a token
        (LETTERS | {"<0xC3>": 10}, {"byte_fallback": True}, NO_UNKNOWN),
        (LETTERS, {"continuing_subword_prefix": "##"}, NO_UNKNOWN),
        (LETTERS | {END: 10}, {"unk_token": END}, "which is also its unknown token"),
    ],
)
def test_a_model_that_would_lose_text_is_refused(
    tmp_path, vocabulary, settings, message
):
    saved(tmp_path, models.BPE(vocabulary, [], **settings))
    with pytest.raises(UserError, match=message):
        get_tokenizer(str(tmp_path))


def test_letters_that_spell_bytes_are_tokens_of_bytes_only_behind_a_byte_level_part(
    tmp_path,
):
    model, decoder = byte_level()["model"], decoders.ByteLevel()
    saved(tmp_path, model, decoder=decoder, normalizer=normalizers.ByteLevel())
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("a\u4e2d")) == "a\u4e2d"
    saved(tmp_path, model, decoder=decoder)
    with pytest.raises(UserError, match=NO_UNKNOWN):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["byte", "with marks"])
def test_special_tokens_that_a_text_spells_are_said(tmp_path, capsys, kind):
    """Elsewhere TinyStories' separator is the token that ends a document."""
    counts, name = f"'{END}' (100 times)", kind
    if kind == "with marks":
        counts, name = f"{counts}, '<|im_end|>' (100 times)", str(tmp_path)
        words = pre_tokenizers.Whitespace()
        saved(tmp_path, **letters(pre_tokenizer=words), special=(END, "<|im_end|>"))
    turns = [f"{'abc' * i}<|im_end|>{END}" for i in range(100)]
    write(tmp_path, {"chat.jsonl": rows(turns)})
    prepared(TextSource((str(tmp_path / "chat.jsonl"),)), tmp_path / "cache", name)
    line = f" characters contain {counts}, encoded as ordinary characters"
    assert capsys.readouterr().err.count(line) == 1


def test_special_tokens_are_looked_for_in_the_first_of_a_text_only(capsys):
    """A tokenizer of 50,000 of them took minutes for each megabyte."""
    tokenizer = SimpleNamespace(special_tokens={END: 0})
    contain = f"the first {SEARCHED:,} characters contain"
    for early, expected in (("", 0), (END, 1)):
        texts = [early + "a" * 40_000, "b" * SEARCHED + END]
        batch = SimpleNamespace(texts=texts)
        assert list(note_special_tokens(iter([batch]), tokenizer)) == [batch]
        assert capsys.readouterr().err.count(contain) == expected


def test_characters_that_a_tokenizer_changes_are_said_once(tmp_path, capsys):
    words = pre_tokenizers.Whitespace()
    saved(tmp_path, **letters(normalizer=normalizers.Lowercase(), pre_tokenizer=words))
    write(tmp_path, {"a.txt": "a b c\n" * 50})
    source = TextSource((str(tmp_path / "a.txt"),))
    for _ in range(2):
        prepared(source, tmp_path / "cache", str(tmp_path))
    [line] = [x for x in capsys.readouterr().err.splitlines() if "ASCII" in x]
    assert r"\n" in line
    assert "AB" in line
    assert changed_characters(get_tokenizer("byte")) == ""


OF_BYTES = byte_level() | {"decoder": decoders.ByteLevel()}
NOT_ASCII = Regex(r"[^\x00-\x7f]+")
DROPPED_WORDS = [pre_tokenizers.Split(NOT_ASCII, "removed"), OF_BYTES["pre_tokenizer"]]
ASCII = models.BPE({chr(i): i for i in range(128)}, [], unk_token="\0", fuse_unk=True)
OTHERS = "".join(char for char in TRIED if not char.isascii())


@pytest.mark.parametrize(
    ("parts", "changed"),
    [
        (OF_BYTES, ""),
        (OF_BYTES | {"normalizer": normalizers.NFD()}, ""),
        (OF_BYTES | {"normalizer": normalizers.NFKC()}, ""),
        (OF_BYTES | {"normalizer": normalizers.Strip()}, " \t\n\r\x0b\x0c"),
        (OF_BYTES | {"normalizer": normalizers.Replace(NOT_ASCII, "")}, OTHERS),
        (OF_BYTES | {"pre_tokenizer": pre_tokenizers.Sequence(DROPPED_WORDS)}, OTHERS),
        ({"model": ASCII, "decoder": decoders.Fuse()}, OTHERS),
    ],
    ids=["none", "NFD", "NFKC", "strip", "normalizer", "words", "unknown token"],
)
def test_a_script_that_a_tokenizer_drops_is_changed(tmp_path, parts, changed):
    saved(tmp_path, **parts)
    assert changed_characters(get_tokenizer(str(tmp_path))) == changed


@pytest.mark.parametrize(("text", "share"), [("ab", ""), ("ab\u4e2d", " (25.00% u")])
def test_the_share_of_unknown_tokens_is_printed(tmp_path, text, share):
    """Each text has an end, too."""
    model = models.BPE(LETTERS | {"<unk>": 10}, [], unk_token="<unk>", fuse_unk=True)
    saved(tmp_path, model)
    write(tmp_path, {"a.jsonl": rows([text] * 10)})
    source = TextSource((str(tmp_path / "a.jsonl"),))
    manifest = prepared(source, tmp_path / "cache", str(tmp_path))
    line = describe(manifest)[0]
    assert f" tokens{share}" in line
    assert ("unknown" in line) == bool(share)


def test_a_panic_of_a_decoder_is_an_error_in_a_line(tmp_path):
    """It panics at a token that it strips to nothing, here a byte of a letter."""

    def write_with_strip(spelling):
        strip = decoders.Strip(spelling, 0, 9)
        decoder = decoders.Sequence([strip, decoders.ByteLevel()])
        composed = {"normalizer": normalizers.NFC(), "decoder": decoder}
        saved(tmp_path, **OF_BYTES | composed)

    write_with_strip(SPELLING["\u4e2d".encode()[0]])
    with pytest.raises(UserError, match=r"is damaged \(Panic") as refused:
        get_tokenizer(str(tmp_path))
    assert "\n" not in str(refused.value)
    write_with_strip(SPELLING["\u5b57".encode()[0]])
    tokenizer = get_tokenizer(str(tmp_path))
    ids = tokenizer.encode("\u5b57")
    with pytest.raises(UserError, match=r"is damaged \(Panic"):
        tokenizer.decode(ids)


def test_text_that_spells_an_end_which_is_not_marked_special_does_not_end(tmp_path):
    model = models.BPE(LETTERS | {"<unk>": 10}, [], unk_token="<unk>", fuse_unk=True)
    saved(tmp_path, model, special=(), words=[AddedToken("</s>")])
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.eot == 11
    assert tokenizer.encode("a</s>b") == [0, 10, 1]


def test_a_post_processor_repeats_no_text(tmp_path):
    twice = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    saved(tmp_path, **letters(), post_processor=twice)
    tokenizer = get_tokenizer(str(tmp_path))
    for encode in (tokenizer.encode, tokenizer.encode_array):
        assert list(encode("abc")) == [0, 1, 2]
    assert tokenizer.encode_array("b\n", "a\n", "c").tolist() == [1, 0]
    # transformers reads an export as it read the original.
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]


NAMES = {
    CONFIG: {"eos_token": "<b>"},
    "special_tokens_map.json": {"eos_token": {"content": "<b>"}},
    "generation_config.json": {"eos_token_id": [999, 257]},
    "config.json": {"eos_token_id": 257},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("normalizer", [{}, {"normalizer": normalizers.NFC()}])
def test_the_end_is_read_from_whichever_file_names_it(tmp_path, name, normalizer):
    """An encoding as GPT-2's, may have its end among other tokens."""
    saved(tmp_path, **byte_level(), special=[END, "<b>"], **normalizer)
    assert get_tokenizer(str(tmp_path)).eot == 256
    (tmp_path / name).write_text(json.dumps(NAMES[name]))
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.eot == 257
    assert not {256, 257} & set(tokenizer.encode(f"{END}<b>"))


def test_settings_behind_a_link_that_leads_nowhere_are_not_left_out(tmp_path):
    saved(tmp_path, **byte_level(), special=[END, "<b>"])
    for name in (CONFIG, "tokenizer.tiktoken"):
        (tmp_path / name).symlink_to("../../blobs/0123")
        with pytest.raises(UserError, match=rf"{name} is a link to .*0123, where no f"):
            get_tokenizer(str(tmp_path))
        (tmp_path / name).unlink()


def decoder(i, content, **flags):
    """Return settings that list an added token."""
    return {"added_tokens_decoder": {str(i): {"content": content, **flags}}}


def test_of_two_files_that_name_an_end_the_one_of_transformers_counts(tmp_path):
    saved(tmp_path, **letters(special=["<a>", "<b>"]))
    settings = {"eos_token": "<b>"}
    write(tmp_path, {"special_tokens_map.json": '{"eos_token": "<a>"}'})
    for more, end in (({}, 10), (decoder(11, "<b>"), 11)):
        (tmp_path / CONFIG).write_text(json.dumps(settings | more))
        assert get_tokenizer(str(tmp_path)).eot == end


def test_a_pair_of_files_has_the_end_that_is_named_or_known(tmp_path):
    for end in ("</s>", END):
        pair(tmp_path, end)
        assert get_tokenizer(str(tmp_path)).eot == 1
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
    tokenizer = get_tokenizer(str(tmp_path))
    assert tokenizer.eot == 0
    assert tokenizer.encode(f"ab{END}")[0] == 258
    assert not {0, 1} & set(tokenizer.encode(f"ab{END}<s>"))


BERT = {
    "model": models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"),
    "normalizer": normalizers.BertNormalizer(),
    "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
}
PREPEND = letters(normalizer=normalizers.Sequence([normalizers.Prepend("\u2581")]))
METASPACE = letters(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"))
NO_SPACE = {"eos_token": END, "add_prefix_space": False}
LLAMA = NO_SPACE | {"tokenizer_class": "LlamaTokenizer"}
PUTS_A_SPACE = "add_prefix_space=False, but .* puts a space"
QWEN = "a Qwen2Tokenizer may split words otherw"
TOOL = letters(words=["<tool>"])
NEW = "adds '<new>' with the id 300, but .*; save"
SPECIAL = AddedToken("<tool>", special=True, lstrip=True)
WORDS = models.BPE(LETTERS | {END: 10, "<tool>": 11}, [], unk_token="a")


def flag_rows(flag):
    for value in (True, False):
        yield (
            letters(words=[AddedToken("<tool>", **{flag: value})]),
            CONFIG,
            decoder(11, "<tool>", **{flag: value}),
            decoder(11, "<tool>", **{flag: not value}),
            rf"has {flag}={not value} for the added word '<tool>', and tokenizer\.json",
        )


# The parts of a tokenizer.json (None: a pair of files); a file beside it with content
# that agrees, and with content by which transformers changes the tokenizer.
@pytest.mark.parametrize(
    ("parts", "name", "agrees", "changes", "message"),
    [
        (
            byte_level(True),
            CONFIG,
            {"add_prefix_space": True},
            {"add_prefix_space": False},
            "has add_prefix_space=False, .*=True in its .*; make",
        ),
        (
            BERT,
            CONFIG,
            {"do_lower_case": True},
            {"do_lower_case": False},
            "has do_lower_case=False, .*=True in its .*; make",
        ),
        (PREPEND, CONFIG, NO_SPACE, LLAMA, PUTS_A_SPACE),
        (METASPACE, CONFIG, NO_SPACE, LLAMA, PUTS_A_SPACE),
        (None, CONFIG, {}, {"add_prefix_space": True}, r"=True, and merges\.txt"),
        (None, "config.json", {"model_type": "gpt2"}, {"model_type": "qwen2"}, QWEN),
        (
            None,
            CONFIG,
            {"tokenizer_class": "GPT2Tokenizer"},
            {"tokenizer_class": "Qwen2Tokenizer"},
            QWEN,
        ),
        (None, "added_tokens.json", {END: 1}, {"<new>": 300}, NEW),
        (None, CONFIG, decoder(1, END), decoder(300, "<new>"), NEW),
        (TOOL, "added_tokens.json", {"<tool>": 11}, {"<new>": 300}, NEW),
        (TOOL, CONFIG, decoder(11, "<tool>"), decoder(300, "<new>"), NEW),
        *flag_rows("lstrip"),
        *flag_rows("rstrip"),
        *flag_rows("single_word"),
        *flag_rows("normalized"),
        # no text has a special token, whatever its flags
        (
            letters(words=[SPECIAL]),
            CONFIG,
            decoder(11, "<tool>", special=True, lstrip=False),
            {"eos_token": "<other>"},
            "has no added token '<other>'",
        ),
        # a token of the vocabulary that is a word beside it
        (
            {"model": WORDS},
            CONFIG,
            decoder(11, "<tool>", special=True),
            decoder(11, "<tool>"),
            "adds the word '<tool>', which is none of",
        ),
    ],
)
def test_files_beside_a_tokenizer_may_not_change_it(
    tmp_path, parts, name, agrees, changes, message
):
    if parts is None:
        pair(tmp_path)
    else:
        saved(tmp_path, **parts)
    (tmp_path / name).write_text(json.dumps(agrees))
    get_tokenizer(str(tmp_path))
    (tmp_path / name).write_text(json.dumps(changes))
    with pytest.raises(UserError, match=message):
        get_tokenizer(str(tmp_path))
