import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_titan.data.corpus import find_files, read_documents
from jax_titan.data.errors import DataError
from jax_titan.data.tokenizer import (
    BOS,
    EOS,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load,
    open_tokenizer,
    pieces,
    train_bpe,
)


def chapters(count: int) -> list[str]:
    documents = read_documents(find_files(""), "text")
    return [next(documents).text.decode() for _ in range(count)]


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return train_bpe(chapters(10), 600)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue("bpe")


def random_unicode(rng: np.random.Generator, longest: int) -> str:
    """Any code points but surrogates, with much white space among them."""
    points = rng.integers(0, 0x110000 - 0x800, rng.integers(0, longest))
    characters = [chr(p if p < 0xD800 else p + 0x800) for p in points]
    spaces = rng.choice(list(" \n\r\t\x0b\x1c\x85\xa0\u2028\u3000'a1"), len(characters))
    return "".join(np.where(rng.random(len(characters)) < 0.5, characters, spaces)) if characters else ""


def test_any_unicode_text_survives_encoding(tokenizer: Tokenizer):
    rng = np.random.default_rng(1)
    texts = [
        "",
        " ",
        "\n\n",
        "a  b",
        " a",
        "a ",
        "\r\n",
        "\x00",
        *(random_unicode(rng, 80) for _ in range(300)),
    ]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer):
    text = "Ahab — 漢字 🐋\n" * 5
    assert tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())


def test_specials_are_two_ids_without_bytes(tokenizer: Tokenizer):
    assert {tokenizer.bos, tokenizer.eos} == {tokenizer.vocab_size - 2, tokenizer.vocab_size - 1}
    assert tokenizer.token_bytes[[tokenizer.bos, tokenizer.eos]].tolist() == [0, 0]
    assert (np.delete(tokenizer.token_bytes, [tokenizer.bos, tokenizer.eos]) > 0).all()
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode("x"), tokenizer.eos]) == "x"


def test_text_that_spells_a_special_is_ordinary_text(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "t.json")
    for t in (tokenizer, load(tmp_path / "t.json")):
        for text in (EOS, BOS, f"before {EOS}after{BOS}"):
            ids = t.encode(text)
            assert not {t.bos, t.eos} & set(ids.tolist())
            assert t.decode(ids) == text


def test_text_that_spells_a_special_becomes_it_where_asked(tokenizer: Tokenizer):
    bos, eos = tokenizer.bos, tokenizer.eos
    text = f"{BOS}a{EOS}{EOS} b{BOS[:-1]}"
    ids = tokenizer.encode(text, specials=True)
    a, b = tokenizer.encode("a").tolist(), tokenizer.encode(f" b{BOS[:-1]}").tolist()
    assert ids.tolist() == [bos, *a, eos, eos, *b]
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids, specials=True) == text
    assert tokenizer.decode(ids) == f"a b{BOS[:-1]}"
    batch = tokenizer.encode_batch(["", text, "a"], specials=True)
    assert [each.tolist() for each in batch] == [[], ids.tolist(), a]


def test_generation_ends_at_the_end_of_text(tokenizer: Tokenizer):
    assert tokenizer.stop_ids == {tokenizer.eos}


def test_a_special_spelled_in_the_training_text_stays_ordinary_text():
    trained = train_bpe([f"{EOS} {EOS} {EOS}"] * 50, 400)
    assert trained.eos not in trained.encode(EOS)
    assert trained.decode(trained.encode(EOS)) == EOS


def test_a_saved_tokenizer_loads_as_the_same(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "t.json")
    loaded = load(tmp_path / "t.json")
    assert (loaded.digest, loaded.vocab_size, loaded.bos, loaded.eos) == (
        tokenizer.digest,
        tokenizer.vocab_size,
        tokenizer.bos,
        tokenizer.eos,
    )
    np.testing.assert_array_equal(loaded.encode("Call me Ishmael."), tokenizer.encode("Call me Ishmael."))
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_bytes_of_a_broken_character_decode_to_a_replacement():
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"


def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer):
    with pytest.raises(DataError, match=f"{tokenizer.vocab_size} is not in"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(DataError, match="-1 is not in"):
        tokenizer.decode([-1])


def test_bpe_has_the_size_asked_for_and_shortens_text(bpe: BpeTokenizer):
    text = chapters(11)[-1]  # not trained on
    assert bpe.vocab_size == 600
    assert len(bpe.encode(text)) < 0.6 * len(text.encode())


def test_bpe_trains_the_same_in_another_process():
    script = (
        "from jax_titan.data.tokenizer import train_bpe\n"
        "print(train_bpe(['the whale, the white whale; the sea ' * 9, 'a sea of whales'], 300).digest)"
    )
    digests = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(digests) == 1


def test_digests_tell_tokenizers_apart(bpe: BpeTokenizer):
    others = [train_bpe(chapters(10), 601), train_bpe(chapters(9), 600)]
    assert len({ByteTokenizer().digest, bpe.digest, *(t.digest for t in others)}) == 4
    assert train_bpe(chapters(10), 600).digest == bpe.digest


def test_a_corpus_too_small_for_the_vocabulary_gives_what_there_is():
    trained = train_bpe(["abab"], 1000)
    assert trained.vocab_size == 256 + 1 + 2  # the one pair that occurs twice
    assert (trained.bos, trained.eos) == (257, 258)


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(DataError, match=r"data\.vocab_size: 257 .* use 258"):
        train_bpe(["abc"], 257)
    assert train_bpe(["abc"], 258).vocab_size == 258


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"kind": "unigram"}', "\x00"])
def test_a_file_that_is_no_tokenizer_is_refused(content: str | None, tmp_path: Path):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=r"t\.json is not a tokenizer"):
        load(path)


def test_a_tokenizer_that_splits_otherwise_is_refused(bpe: BpeTokenizer, tmp_path: Path):
    path = tmp_path / "t.json"
    bpe.save(path)
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="our split"):
        load(path)


def test_pieces_encode_as_the_whole_text_does(bpe: BpeTokenizer):
    rng = np.random.default_rng(2)
    marks = [*"\n\n\n\r\t .,!'aé漢\u0301\u2028", "Whale", "12345", "'ll"]
    for text in ["".join(rng.choice(marks, 400)) for _ in range(60)] + [random_unicode(rng, 900)]:
        cut = list(pieces(text, size=10))
        assert "".join(cut) == text
        ids = np.concatenate(bpe.encode_batch(cut))
        np.testing.assert_array_equal(ids, bpe.encode(text))
    assert len(list(pieces("line\n" * 100, size=10))) > 10


def test_a_tokenizer_is_opened_from_its_file_or_directory(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for file in (tmp_path, tmp_path / "tokenizer.json"):
        opened = open_tokenizer(tokenizer.kind, str(file))
        assert (opened.kind, opened.digest) == (tokenizer.kind, tokenizer.digest)
    assert open_tokenizer("bytes", "").digest == ByteTokenizer().digest


@pytest.mark.parametrize(
    ("kind", "file", "message"),
    [
        ("words", "", r"data\.tokenizer: 'words' is not known; use one of bytes, bpe, llama3, huggingface"),
        ("bpe", "", r"data\.tokenizer_file: bpe needs a file; give the path of"),
        ("huggingface", "", r"data\.tokenizer_file: huggingface needs a file; give the path of a tokenizer\.json"),
        ("bpe", "none.json", r"data\.tokenizer_file: .*none\.json cannot be read \(No such file"),
        ("llama3", ".", r"data\.tokenizer_file: .* has no tokenizer\.model in it"),
        ("huggingface", ".", r"data\.tokenizer_file: .* has no tokenizer\.json in it"),
        ("bpe", "cut.json", r"data\.tokenizer_file: .*cut\.json is damaged"),
        ("huggingface", "cut.json", r"data\.tokenizer_file: .*cut\.json is damaged"),
        ("llama3", "cut.json", r"data\.tokenizer_file: .*cut\.json is damaged"),
        ("huggingface", "config.json", r"data\.tokenizer_file: .*config\.json has no model in it"),
        ("huggingface", "empty.json", r"data\.tokenizer_file: .*empty\.json cannot be read .*; get it again"),
        ("bpe", "bytes.json", r"data\.tokenizer_file: .*is of another kind; use data\.tokenizer bytes"),
        ("bpe", "binary", r"data\.tokenizer_file: .*binary line 1 is not"),
        ("bpe", "odd.json", r"data\.tokenizer_file: .*odd\.json is not a tokenizer that can be loaded"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(kind: str, file: str, message: str, tmp_path: Path):
    ByteTokenizer().save(tmp_path / "bytes.json")
    (tmp_path / "cut.json").write_text('{"model": {"type": "BPE", "vocab": {"a"')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "empty.json").write_text('{"model": {}}')
    (tmp_path / "odd.json").write_text('{"kind": "odd"}')
    (tmp_path / "binary").write_bytes(b"\x00\x0a\xff")
    with pytest.raises(DataError, match=message) as caught:
        open_tokenizer(kind, str(tmp_path / file) if file else "")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_json_that_is_not_ours_is_refused_with_the_kind_to_use(bpe: BpeTokenizer, tmp_path: Path):
    path = tmp_path / "t.json"
    bpe.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": None}))
    with pytest.raises(DataError, match=r"data\.tokenizer_file: .*use data\.tokenizer huggingface"):
        open_tokenizer("bpe", str(path))
