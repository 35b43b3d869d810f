import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jax_titan.data import store as store_module
from jax_titan.data.errors import DataError
from jax_titan.data.store import SPLITS, CorpusSpec, Split, TokenStore, open_store, prepare
from jax_titan.data.tokenizer import ByteTokenizer, train_bpe

from .conftest import write_jsonl


def documents(store: TokenStore, split: Split) -> list[np.ndarray]:
    return [store.document(split, i) for i in range(store.documents(split))]


def text_of(store: TokenStore, document: np.ndarray) -> str:
    assert document[0] == store.tokenizer.bos
    assert document[-1] == store.tokenizer.eos
    return store.tokenizer.decode(document[1:-1])


def texts_of(store: TokenStore, split: Split) -> list[str]:
    return [text_of(store, document) for document in documents(store, split)]


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_document_is_stored_whole_in_order_and_once(kind, corpus: Path, texts: list[str], tmp_path: Path):
    store = prepare(CorpusSpec(str(corpus), kind, 300, validation_fraction=0.2), tmp_path / "cache")
    train, validation = texts_of(store, "train"), texts_of(store, "validation")
    assert Counter(train) + Counter(validation) == Counter(texts)
    assert not set(train) & set(validation)
    assert train == [text for text in texts if text in set(train)]
    for split, kept in zip(SPLITS, (train, validation), strict=True):
        meta = store.meta.splits[split]
        assert meta.documents == store.documents(split) == len(kept)
        assert meta.text_bytes == sum(len(text.encode()) for text in kept)
        assert meta.tokens == store.tokens(split) == len(store.stream(split)) == store.offsets(split)[-1]


def test_bpe_is_trained_on_the_training_documents_only(corpus: Path, tmp_path: Path):
    store = prepare(CorpusSpec(str(corpus), "bpe", 300, validation_fraction=0.2), tmp_path / "cache")
    assert store.tokenizer.digest == train_bpe(texts_of(store, "train"), 300).digest
    assert store.vocab_size == store.meta.tokenizer["vocab_size"] == 300


def test_the_store_needs_nothing_but_its_directory(corpus: Path, tmp_path: Path):
    store = prepare(CorpusSpec(str(corpus), "bpe", 300), tmp_path / "cache")
    before = texts_of(store, "train")
    moved = tmp_path / "elsewhere"
    shutil.move(store.directory, moved)
    corpus.unlink()
    reopened = open_store(moved, verify=True)
    assert texts_of(reopened, "train") == before
    assert (reopened.digest, reopened.meta) == (store.digest, store.meta)


def test_a_small_vocabulary_takes_two_bytes_a_token_and_a_large_one_four(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = prepare(CorpusSpec(str(corpus)), tmp_path / "small")
    assert small.stream("train").dtype == np.uint16
    monkeypatch.setattr(ByteTokenizer, "vocab_size", (1 << 16) + 1)
    large = prepare(CorpusSpec(str(corpus)), tmp_path / "large")
    assert large.stream("train").dtype == np.uint32
    np.testing.assert_array_equal(large.stream("train"), small.stream("train"))


def test_the_tokens_stay_on_disk(store: TokenStore):
    assert isinstance(store.stream("train"), np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        store.document("train", 0)[0] = 1


def test_a_document_that_does_not_exist_is_an_index_error(store: TokenStore):
    for i in (-1, store.documents("train")):
        with pytest.raises(IndexError):
            store.document("train", i)


def test_a_second_prepare_reads_the_cache_and_tokenizes_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spec, batches = CorpusSpec(str(corpus)), []
    encode = ByteTokenizer.encode_batch
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda self, t: (batches.append(t), encode(self, t))[1])
    first = prepare(spec, tmp_path / "cache")
    assert len(batches) == 1
    stages = set()
    second = prepare(spec, tmp_path / "cache", lambda done, total, what: stages.add(what))
    assert len(batches) == 1
    assert stages == {"reading the corpus"}
    assert second.meta == first.meta


def test_the_digest_follows_what_decides_the_content_and_nothing_else(corpus: Path, tmp_path: Path):
    def digest(path: Path = corpus, cache: str = "cache", **spec) -> str:
        return prepare(CorpusSpec(str(path), **spec), tmp_path / cache).digest

    original = digest()
    copy = tmp_path / "elsewhere" / corpus.name
    copy.parent.mkdir()
    shutil.copy(corpus, copy)
    os.utime(copy, (1, 1))
    assert digest(copy, cache="other") == original
    assert digest(vocab_size=999) == original  # bytes have no choice
    different = [
        digest(validation_fraction=0.5),
        digest(tokenizer="bpe", vocab_size=300),
        digest(tokenizer="bpe", vocab_size=301),
    ]
    write_jsonl(corpus, ["another", "corpus"])
    different.append(digest())
    assert len({original, *different}) == 5


def test_building_twice_gives_the_same_bytes(corpus: Path, tmp_path: Path):
    spec = CorpusSpec(str(corpus), "bpe", 300)
    one, two = (prepare(spec, tmp_path / cache).directory for cache in ("one", "two"))
    assert names(one) == names(two)
    for name in names(one):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_text_is_tokenized_in_bounded_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_module, "_BATCH_CHARACTERS", 1000)
    texts = [f"document {i} of many, this long" for i in range(500)] + ["one line of a long one\n" * 20_000]
    portions: list[int] = []
    encode = ByteTokenizer.encode_batch

    def measured(self: ByteTokenizer, batch: Sequence[str]) -> list[np.ndarray]:
        portions.append(sum(map(len, batch)))
        return encode(self, batch)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", measured)
    corpus = write_jsonl(tmp_path / "c.jsonl", texts)
    store = prepare(CorpusSpec(str(corpus), validation_fraction=0), tmp_path / "cache")
    assert max(portions) < 1000 + 70_000  # a piece of a document is 64 Ki characters and the rest of a line
    assert sum(portions) == sum(map(len, texts))
    assert texts_of(store, "train") == texts


def test_progress_ends_at_its_total_for_every_stage(corpus: Path, tmp_path: Path):
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(done: int, total: int, what: str) -> None:
        seen.setdefault(what, []).append((done, total))

    prepare(CorpusSpec(str(corpus), "bpe", 300), tmp_path / "cache", note)
    assert list(seen) == ["reading the corpus", "finding documents", "training the tokenizer", "tokenizing"]
    for stages in seen.values():
        assert [done for done, _ in stages] == sorted(done for done, _ in stages)
        assert stages[-1][0] == stages[-1][1] > 0


def test_a_text_file_is_cut_in_two_and_its_end_validates(tmp_path: Path):
    lines = [f"line {i:03}\n" for i in range(100)]
    (tmp_path / "book.txt").write_text("".join(lines))
    store = prepare(CorpusSpec(str(tmp_path / "book.txt"), validation_fraction=0.05), tmp_path / "cache")
    assert texts_of(store, "train") == ["".join(lines[:95])]
    assert texts_of(store, "validation") == ["".join(lines[95:])]
    assert store.meta.cut_at_byte == 95 * 9


def test_no_validation_is_no_validation(corpus: Path, texts: list[str], tmp_path: Path):
    store = prepare(CorpusSpec(str(corpus), validation_fraction=0), tmp_path / "cache")
    assert texts_of(store, "train") == texts
    assert (store.documents("validation"), store.tokens("validation")) == (0, 0)
    assert store.unigram_nats() is None
    assert open_store(store.directory).stream("validation").shape == (0,)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_unigram_loss_is_that_of_counting(kind, corpus: Path, tmp_path: Path):
    store = prepare(CorpusSpec(str(corpus), kind, 280, validation_fraction=0.2), tmp_path / "cache")
    counts = Counter(int(t) for document in documents(store, "train") for t in document[1:])
    total = sum(counts.values()) + store.vocab_size
    losses = [
        -np.log((counts[int(t)] + 1) / total) for document in documents(store, "validation") for t in document[1:]
    ]
    assert store.unigram_nats() == pytest.approx(np.mean(losses), rel=1e-12)


# Errors.


def error_of(spec: CorpusSpec, cache: Path) -> str:
    with pytest.raises(DataError) as raised:
        prepare(spec, cache)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_corpus_of_empty_documents_is_refused(tmp_path: Path):
    corpus = write_jsonl(tmp_path / "a.jsonl", ["", ""])
    message = error_of(CorpusSpec(str(corpus)), tmp_path / "cache")
    assert message == f"data.path: {corpus} holds no text, only empty documents; give it some"
    assert names(tmp_path / "cache") == []


def test_a_single_character_cannot_validate_itself(tmp_path: Path):
    (tmp_path / "a.txt").write_text("é")
    message = error_of(CorpusSpec(str(tmp_path / "a.txt")), tmp_path / "cache")
    assert "set data.validation_fraction to 0" in message
    store = prepare(CorpusSpec(str(tmp_path / "a.txt"), validation_fraction=0), tmp_path / "cache")
    assert texts_of(store, "train") == ["é"]


def test_a_vocabulary_too_small_is_refused_before_the_corpus_is_read(tmp_path: Path):
    spec = CorpusSpec(str(tmp_path / "missing"), "bpe", 100)
    assert error_of(spec, tmp_path / "cache").startswith("data.vocab_size: 100 is too small for bpe; use 258")


def test_a_bad_line_fails_the_build_and_leaves_nothing(corpus: Path, tmp_path: Path):
    with corpus.open("a") as file:
        file.write('{"text": "cut')
    assert "corpus.jsonl line 61 is not valid JSON" in error_of(CorpusSpec(str(corpus)), tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_named(corpus: Path):
    message = error_of(CorpusSpec(str(corpus)), corpus / "cache")  # below a file
    assert message.startswith(f"data.cache: {corpus / 'cache'} cannot hold the token store (Not a directory)")


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("moment", ["reading the corpus", "finding documents", "tokenizing"])
@pytest.mark.parametrize("change", ["other documents", "same sizes", "broken"])
def test_a_corpus_that_changes_while_it_is_read_is_refused(
    kind, moment: str, change: str, corpus: Path, texts: list[str], tmp_path: Path
):
    def meddle(done: int, total: int, what: str) -> None:
        if what != moment or done != total:
            return
        if change == "broken":
            corpus.write_bytes(b"\xff")
        else:
            write_jsonl(corpus, ["other", "text"] if change == "other documents" else texts[::-1])
        os.utime(corpus, (1, 1))  # clocks of file systems are coarse, and this was quick

    with pytest.raises(DataError, match=r"changed while it was read; start again|not UTF-8"):
        prepare(CorpusSpec(str(corpus), kind, 300), tmp_path / "cache", meddle)
    assert names(tmp_path / "cache") == []


# Whole or not at all.


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train.tokens", "validation.index.npy"])
def test_a_damaged_store_is_built_again_and_said_so(
    name: str, damage, corpus: Path, texts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    spec = CorpusSpec(str(corpus), "bpe", 280)
    store = prepare(spec, tmp_path / "cache")
    whole = {file: (store.directory / file).read_bytes() for file in names(store.directory)}
    damage(store.directory / name)
    prepare(spec, tmp_path / "cache")
    assert {file: (store.directory / file).read_bytes() for file in names(store.directory)} == whole
    assert names(tmp_path / "cache") == [store.digest]
    (record,) = caplog.records
    assert f"{store.digest} is damaged, building it again" in record.getMessage()


def test_opening_a_damaged_store_names_the_directory_to_delete(store: TokenStore):
    truncate(store.directory / "train.tokens")
    with pytest.raises(DataError, match=rf"{store.directory} is damaged .* bytes instead of .*; delete it"):
        open_store(store.directory)


def test_opening_a_store_of_another_version_names_the_versions(store: TokenStore):
    path = store.directory / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(DataError, match="format 99 instead of 1"):
        open_store(store.directory)


@pytest.mark.parametrize("moment", ["finding documents", "tokenizing", "renaming"])
def test_a_killed_build_does_no_harm(moment: str, corpus: Path, texts: list[str], tmp_path: Path):
    script = (
        "import os, pathlib, signal, sys\n"
        "from jax_titan.data.store import CorpusSpec, prepare\n"
        "corpus, cache, moment = sys.argv[1:]\n"
        "def kill(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "if moment == 'renaming': pathlib.Path.rename = kill\n"
        "prepare(CorpusSpec(corpus), cache, lambda done, total, what: kill() if what == moment else None)\n"
    )
    cache = tmp_path / "cache"
    died = subprocess.run([sys.executable, "-c", script, str(corpus), str(cache), moment])
    assert died.returncode == -signal.SIGKILL
    (left,) = names(cache)
    assert left.startswith(".building-")
    store = prepare(CorpusSpec(str(corpus)), cache)
    assert sorted(texts_of(store, "train") + texts_of(store, "validation")) == sorted(texts)


def test_a_build_that_another_overtakes_ends_well(corpus: Path, tmp_path: Path):
    spec, overtaken = CorpusSpec(str(corpus)), []

    def overtake(done: int, total: int, what: str) -> None:
        if what == "tokenizing" and not overtaken:
            overtaken.append(prepare(spec, tmp_path / "cache"))

    slow = prepare(spec, tmp_path / "cache", overtake)
    assert slow.meta == overtaken[0].meta
    assert names(tmp_path / "cache") == [slow.digest]
    for split in SPLITS:
        np.testing.assert_array_equal(slow.stream(split), overtaken[0].stream(split))


def test_processes_that_build_at_once_all_end_well(corpus: Path, tmp_path: Path):
    script = (
        "import sys\n"
        "from jax_titan.data.store import CorpusSpec, prepare\n"
        "store = prepare(CorpusSpec(sys.argv[1], 'bpe', 300), sys.argv[2])\n"
        "print(store.digest, store.stream('train').sum())\n"
    )
    command = [sys.executable, "-c", script, str(corpus), str(tmp_path / "cache")]
    builds = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {build.communicate()[0] for build in builds}
    assert [build.returncode for build in builds] == [0, 0, 0]
    assert len(outputs) == 1
    assert names(tmp_path / "cache") == [outputs.pop().split()[0]]
