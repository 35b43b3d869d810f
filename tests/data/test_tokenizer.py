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
