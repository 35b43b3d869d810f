import gzip
import hashlib
import json
import lzma
import os
import shutil
from pathlib import Path

import pytest

from jax_titan.data.corpus import CorpusSpec, corpus_digest, find_files, read_documents
from jax_titan.data.errors import DataError


def texts_of(path: Path | str, text_field: str = "text") -> list[str]:
    return [document.text.decode() for document in read_documents(find_files(str(path)), text_field)]


def error_of(path: Path | str, text_field: str = "text") -> str:
    with pytest.raises(DataError) as raised:
        texts_of(path, text_field)
    message = str(raised.value)
    assert "\n" not in message
    return message


def digest_of(path: Path) -> str:
    return corpus_digest(find_files(str(path)))


def test_the_bundled_corpus_is_the_book_byte_for_byte():
    texts = texts_of("")
    assert len(texts) == 135
    assert all(text.startswith(f"CHAPTER {i}. ") for i, text in enumerate(texts, start=1))
    assert (
        hashlib.sha256("".join(texts).encode()).hexdigest()
        == "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"
    )


def test_the_titles_of_the_bundled_corpus_are_its_headings():
    titles = texts_of("", "title")
    assert titles[0] == "CHAPTER 1. Loomings."
    for title, text in zip(titles, texts_of(""), strict=True):
        assert " ".join(text.split()).startswith(title)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a", "a.txt.gz", "a.TXT.xz"])
def test_a_text_file_is_one_document_kept_byte_for_byte(name: str, tmp_path: Path):
    text = "one\r\n\r\ntwo\u2028\x85 three\n"
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(text.encode()))
    assert texts_of(tmp_path / name) == [text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz"])
def test_a_jsonl_file_is_a_document_a_line(name: str, tmp_path: Path):
    lines = b'\xef\xbb\xbf{"text": "one\\ntwo"}\n\n  \r\n{"text": ""}\n{"x": 1, "text": "\xc3\xa9"}'
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(lines))
    assert texts_of(tmp_path / name) == ["one\ntwo", "é"]


def test_white_space_is_text_and_nothing_is_not(tmp_path: Path):
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf")
    assert texts_of(tmp_path) == [" \n"]


def test_a_directory_is_its_text_files_by_relative_path(tmp_path: Path):
    for name in ("b.txt", "a/z.txt", "a.txt", ".hidden.txt", ".git/x.txt", "read.me", "a/c.txt.gz"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(name.encode()) if name.endswith(".gz") else name.encode())
    (tmp_path / "a" / "l.jsonl").write_text('{"text": "line"}')
    assert texts_of(tmp_path) == ["a.txt", "a/c.txt.gz", "line", "a/z.txt", "b.txt"]


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("home")
    assert texts_of("~/a.txt") == ["home"]


def test_the_digest_follows_content_and_names_only(tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "sub").mkdir(parents=True)
    (here / "a.txt").write_text("one")
    (here / "sub" / "b.txt").write_text("two")
    shutil.copytree(here, there)
    os.utime(there / "a.txt", (1, 1))
    (there / "other.bin").write_text("not read")
    original = digest_of(here)
    assert digest_of(there) == original

    (there / "a.txt").write_text("onE")
    assert digest_of(there) != original
    (there / "a.txt").write_text("one")
    assert digest_of(there) == original
    (there / "a.txt").rename(there / "c.txt")
    assert digest_of(there) != original
    # The same bytes, divided otherwise.
    (here / "a.txt").write_text("onet")
    (here / "sub" / "b.txt").write_text("wo")
    assert digest_of(here) != original


def test_a_missing_path_is_named(tmp_path: Path):
    assert error_of(tmp_path / "no").startswith(f"data.path: {tmp_path}/no does not exist; give a text file")
    assert "cannot be read" in error_of("a\0b")


def test_a_directory_without_text_is_named(tmp_path: Path):
    (tmp_path / "a.pdf").write_text("x")
    assert error_of(tmp_path).startswith(f"data.path: {tmp_path} holds no *.txt, *.jsonl (plain, .gz or .xz) or ")


def test_what_is_neither_file_nor_directory_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a directory" in error_of(tmp_path / "pipe")


def test_a_file_that_is_not_utf8_is_named_with_the_offset(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("é".encode() + b"abc\xff")
    assert "a.txt is not UTF-8: byte 0xff at offset 5; convert it" in error_of(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"ok")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    assert "b.jsonl is not UTF-8: byte 0xe9 at offset 24" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "cut sho', "data.path: {file} line 2 is not valid JSON (Unterminated string"),
        (b'{"text": "cut sho', "the file may be cut short"),
        (b"plain words\n", "data.path: {file} line 2 is not valid JSON (Expecting value"),
        (b"[" * 100_000 + b"\n", "data.path: {file} line 2 is not valid JSON ("),
        (b'["text"]\n', 'data.path: {file} line 2 holds a list, not an object; write {{"text": "..."}}'),
        (b'"text"\n', "data.path: {file} line 2 holds a string, not an object"),
        (b"null\n", "data.path: {file} line 2 holds null, not an object"),
        (b'{"a": "t", "b": "b"}\n', "data.text_field: {file} line 2 has no field 'text'; it has: a, b"),
        (b"{}\n", "data.text_field: {file} line 2 has no field 'text'; it has: none"),
        (b'{"text": 7}\n', "data.text_field: {file} line 2: 'text' is a number, not a text"),
        (b'{"text": true}\n', "data.text_field: {file} line 2: 'text' is a boolean, not a text"),
        (b'{"text": null}\n', "data.text_field: {file} line 2: 'text' is null, not a text"),
        (b'{"text": {"a": 1}}\n', "data.text_field: {file} line 2: 'text' is an object, not a text"),
        (b'{"text": "ab\\ud800"}\n', "data.path: {file} line 2: 'text' has half a surrogate pair at char"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_number(line: bytes, said: str, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line)
    assert said.format(file=path) in error_of(path)


def test_the_text_may_be_in_another_field(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "b", "text": 1}))
    assert texts_of(tmp_path, "body") == ["b"]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.xz"])
def test_a_damaged_compressed_file_is_named(name: str, tmp_path: Path):
    pack = gzip.compress if name.endswith("gz") else lzma.compress
    whole = pack(b'{"text": "a whale"}\n' * 50)
    for damaged in (whole[:-9], b"not compressed at all", whole[:30] + b"\xff" * 9 + whole[39:]):
        (tmp_path / name).write_bytes(damaged)
        assert f"{name} is not a whole .{name[-2:]} file" in error_of(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    assert "a.txt cannot be read (No such file or directory); mend it or remove it" in error_of(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    assert "a.txt cannot be read (Permission denied)" in error_of(tmp_path)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 5, float("nan"), float("inf")])
def test_a_validation_fraction_outside_its_range_is_refused(fraction: float):
    with pytest.raises(DataError, match=r"data\.validation_fraction: .* is not in \[0, 1\)"):
        CorpusSpec(validation_fraction=fraction)


def test_an_unknown_tokenizer_is_refused():
    with pytest.raises(DataError, match=r"data\.tokenizer: 'words' is not known; use one of 'bytes', 'bpe'"):
        CorpusSpec(tokenizer="words")  # pyright: ignore[reportArgumentType]
