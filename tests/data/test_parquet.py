"""Parquet: a document a row, where the optional library is installed; a clear line where it is not."""

import sys
from pathlib import Path

import pytest

from jax_titan.data.corpus import CorpusSpec, find_files, read_documents
from jax_titan.data.errors import DataError
from jax_titan.data.store import prepare


def test_without_the_library_the_way_out_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a\.parquet needs pyarrow; pip install 'jax-titan\[parquet\]'"):
        list(read_documents(find_files(str(tmp_path / "a.parquet")), "text"))


@pytest.fixture
def write(tmp_path: Path):
    pa = pytest.importorskip("pyarrow", reason="the extra jax-titan[parquet] is not installed")
    import pyarrow.parquet as pq

    def write(name: str, columns: dict, **options) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, **options)
        return path

    return write


def documents(path: Path, text_field="text", prompt_field=""):
    read = read_documents(find_files(str(path)), text_field, prompt_field)
    return [(document.prompt.decode(), document.text.decode()) for document in read]


def test_each_row_is_a_document_and_null_is_empty(write):
    texts = [f"text {i} é🐋" for i in range(3000)]
    path = write("a.parquet", {"text": [*texts, None, ""], "other": range(3002)}, row_group_size=700)
    assert documents(path) == [("", text) for text in texts]


def test_prompts_are_a_column(write):
    path = write("a.parquet", {"prompt": ["q1", None], "answer": ["a1", "a2"]})
    assert documents(path, "answer", "prompt") == [("q1", "a1"), ("", "a2")]


def test_a_directory_mixes_parquet_with_other_files(write, tmp_path: Path):
    write("corpus/b.parquet", {"text": ["two"]})
    (tmp_path / "corpus" / "a.txt").write_text("one")
    assert documents(tmp_path / "corpus") == [("", "one"), ("", "two")]
    store = prepare(CorpusSpec(str(tmp_path / "corpus"), validation_fraction=0), tmp_path / "cache")
    assert store.documents("train") == 2


def test_what_is_wrong_is_one_line(write, tmp_path: Path):
    path = write("a.parquet", {"body": ["x"], "number": [1]})
    with pytest.raises(DataError, match=r"data\.text_field: .* has no column 'text'; it has: body, number"):
        documents(path)
    with pytest.raises(DataError, match=r"data\.text_field: .* column 'number' holds int64, not text"):
        documents(path, "number")
    with pytest.raises(DataError, match=r"data\.prompt_field: .* has no column 'prompt'"):
        documents(path, "body", "prompt")
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut\.parquet is not a whole Parquet file") as error:
        documents(tmp_path / "cut.parquet")
    assert "\n" not in str(error.value)
