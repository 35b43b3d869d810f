import base64
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from data.mixed_text import LLAMA3_PATTERN, mixed_text, train_byte_level, write_ranks

from jax_titan.data.errors import DataError
from jax_titan.data.llama3 import Llama3Tokenizer
from jax_titan.data.tokenizer import Tokenizer, load, open_tokenizer

TOKENS = 1500
TEXT = mixed_text(1_000_000, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    write_ranks(train_byte_level(TOKENS), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return open_tokenizer("llama3", str(model))


@pytest.fixture(scope="module")
def reference(model: Path) -> tiktoken.Encoding:
    return build_reference(model)


def build_reference(model: Path) -> tiktoken.Encoding:
    """What Meta's own file of code builds, from the same ranks."""
    ranks = {}
    for line in model.read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    names = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1"]
    names += ["finetune_right_pad_id", "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id"]
    names += ["python_tag"] + [f"reserved_special_token_{i}" for i in range(2, 247)]
    specials = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(names)}
    return tiktoken.Encoding("reference", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=specials)


@pytest.mark.parametrize("specials", [False, True])
def test_ids_of_mixed_text_are_those_of_tiktoken(
    reference: tiktoken.Encoding, tokenizer: Tokenizer, specials: bool
):
    expected = reference.encode(TEXT, allowed_special="all" if specials else set(), disallowed_special=())
    ids = tokenizer.encode(TEXT, specials=specials)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected
    assert bool((ids >= TOKENS).any()) == specials
    assert tokenizer.decode_bytes(ids, specials=True) == TEXT.encode()


def test_every_special_has_the_id_and_spelling_of_llama_3(reference: tiktoken.Encoding, tokenizer: Tokenizer):
    for spelling in reference.special_tokens_set:
        expected = reference.encode(spelling, allowed_special="all")
        assert tokenizer.encode(spelling, specials=True).tolist() == expected
        assert tokenizer.decode_bytes(expected, specials=True) == spelling.encode()
        assert tokenizer.decode_bytes(expected) == b""
        assert tokenizer.token_bytes[expected].tolist() == [0]
    assert tokenizer.vocab_size == TOKENS + 256
    assert (tokenizer.bos, tokenizer.eos) == (TOKENS, TOKENS + 1)
    assert tokenizer.stop_ids == {TOKENS + 1, TOKENS + 8, TOKENS + 9}


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer):
    assert tokenizer.token_bytes[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())


def test_a_batch_gives_what_each_text_gives(tokenizer: Tokenizer):
    texts = ["", " ", "<|eot_id|>", *(mixed_text(500, seed) for seed in range(20))]
    for specials in (False, True):
        for text, ids in zip(texts, tokenizer.encode_batch(texts, specials), strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text, specials))


def test_pieces_encode_as_the_whole_text_does(tokenizer: Tokenizer):
    cut = list(tokenizer.pieces(TEXT))
    assert len(cut) > 2
    assert "".join(cut) == TEXT
    np.testing.assert_array_equal(np.concatenate(tokenizer.encode_batch(cut)), tokenizer.encode(TEXT))


@pytest.mark.parametrize("before", ["", "a", "!", "\n", " !"])
@pytest.mark.parametrize("after", ["", "a", "!", "1", "\n", "\nb", "'s"])
def test_runs_of_white_space_are_split_as_by_tiktoken(
    reference: tiktoken.Encoding, tokenizer: Tokenizer, before: str, after: str
):
    lengths = [1, 2, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 1000]
    texts = [before + space * n + after for n in lengths for space in (" ", "\t", "\u3000")]
    expected = reference.encode_ordinary_batch(texts)
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


@pytest.mark.parametrize("run", [" ", "\t ", "a", "!", "\n", "漢"])
def test_a_run_of_a_megabyte_is_encoded(reference: tiktoken.Encoding, tokenizer: Tokenizer, run: str):
    text = "begin" + run * (1_000_000 // len(run)) + "end"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # tiktoken alone gives up at such runs of white space, hence a shorter one to compare with.
    shorter = "begin" + run * (200_000 // len(run)) + "end"
    assert tokenizer.encode(shorter).tolist() == reference.encode_ordinary(shorter)


def test_a_saved_tokenizer_loads_as_the_same(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    for again in (load(path), open_tokenizer("llama3", str(path)), open_tokenizer("llama3", str(tmp_path))):
        assert (again.kind, again.digest) == ("llama3", tokenizer.digest)
        np.testing.assert_array_equal(again.encode(TEXT, True), tokenizer.encode(TEXT, True))


def test_the_digest_is_that_of_the_ranks(model: Path, tokenizer: Tokenizer, tmp_path: Path):
    lines = model.read_text().splitlines(keepends=True)
    elsewhere = tmp_path / "other.model"
    elsewhere.write_text("".join(reversed(lines)))  # the order of lines says nothing
    assert open_tokenizer("llama3", str(elsewhere)).digest == tokenizer.digest
    elsewhere.write_text("".join(line for line in lines if not line.endswith(f" {TOKENS - 1}\n")))
    assert open_tokenizer("llama3", str(elsewhere)).digest != tokenizer.digest


def test_a_damaged_saved_file_is_refused(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "t.json"
    tokenizer.save(path)
    text = path.read_text()
    ranks = json.loads(text)["ranks"]
    other = text.replace(f'"{ranks[-1]}"', f'"{ranks[-1][::-1]}"')
    for damaged in (text[:-100], other, text.replace('"ranks"', '"rank"')):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(DataError, match=r"t\.json is not a tokenizer"):
            load(path)


@pytest.mark.parametrize("line", ["IQ= 0", "IQ==", "IQ== x", "I?Q== 0", "IQ== 0 0"])
def test_a_broken_line_is_named(model: Path, tmp_path: Path, line: str):
    path = tmp_path / "tokenizer.model"
    lines = model.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], line, *lines[7:]]))
    with pytest.raises(DataError, match=r"data\.tokenizer_file: .*tokenizer\.model line 7 is not") as caught:
        open_tokenizer("llama3", str(path))
    assert "\n" not in str(caught.value)


def test_ranks_that_make_no_tokenizer_are_refused(model: Path, tmp_path: Path):
    path = tmp_path / "tokenizer.model"
    lines = model.read_text().splitlines(keepends=True)
    byte = next(i for i, line in enumerate(lines) if line.split()[1] == "0")
    for broken, why in (
        ([*lines[:byte], *lines[byte + 1 :]], "not 0, 1, 2"),
        ([*lines, f"{lines[5].split()[0]} {len(lines)}\n"], "occurs twice"),
        (lines[:0], "the byte 0x00 is no token"),
    ):
        path.write_text("".join(broken))
        with pytest.raises(DataError, match=why):
            open_tokenizer("llama3", str(path))


def test_a_tokenizer_json_is_refused_with_the_kind_to_use(tmp_path: Path):
    train_byte_level(300).save(str(tmp_path / "tokenizer.json"))
    for file in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(DataError, match=r"data\.tokenizer_file: .*use data\.tokenizer huggingface"):
            open_tokenizer("llama3", str(file))


def test_without_a_file_or_the_package_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jax_titan.data.llama3.find_spec", lambda name: None)
    with pytest.raises(
        DataError, match=r"give the path of a tokenizer\.model, or pip install 'jax-titan\[llama\]'"
    ):
        open_tokenizer("llama3", "")


def test_the_package_of_meta_is_found_without_importing_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
):
    package = tmp_path / "llama_models"
    (package / "llama3").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "llama3" / "tokenizer.model").write_bytes(model.read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_tokenizer("llama3", "").digest == tokenizer.digest


@pytest.mark.skipif(find_spec("llama_models") is None, reason="llama-models, which has the file, is not installed")
def test_the_real_file_has_the_ids_of_llama_3():
    from jax_titan.data.llama3 import installed_model

    real = open_tokenizer("llama3", "")
    assert isinstance(real, Llama3Tokenizer)
    assert real.vocab_size == 128256
    assert real.specials["<|eot_id|>"] == 128009
    assert real.encode("This is a test").tolist() == [2028, 374, 264, 1296]
    expected = build_reference(installed_model()).encode(TEXT, allowed_special="all")
    assert real.encode(TEXT, specials=True).tolist() == expected
    assert real.decode_bytes(expected, specials=True) == TEXT.encode()
