import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from data.mixed_text import LLAMA3_PATTERN, SPELLED, mixed_text, train_byte_level, write_ranks

from jax_titan.data.errors import DataError
from jax_titan.data.tokenizer import Tokenizer, load, open_tokenizer, train_bpe

TEXT = mixed_text(60_000, seed=4)
# What sentencepiece cannot tell from a space.
PLAIN = TEXT.replace("\u2581", "")
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
SPECIALS = ["<s>", "</s>", "<|eot_id|>"]

Content = dict[str, Any]
Maker = Callable[[], Content]


def content_of(library: tokenizers.Tokenizer) -> Content:
    return json.loads(library.to_str())


def byte_level(pattern: str = LLAMA3_PATTERN) -> Content:
    library = train_byte_level(900, pattern)
    library.add_special_tokens(SPECIALS)
    return content_of(library)


def gpt2() -> Content:
    content = byte_level()
    content["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
    }  # fmt: skip
    return content


def sentencepiece(spells_specials: bool = False, **changes: Any) -> Content:
    """As Llama 2's file is: a space is U+2581, one stands before each text, unknown characters are bytes."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        limit_alphabet=80,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    text = mixed_text(100_000, seed=0)
    for special in () if spells_specials else SPELLED:
        text = text.replace(special, "")
    library.train_from_iterator(text.splitlines(), trainer)
    content = content_of(library)
    content["added_tokens"] = [t for t in content["added_tokens"] if not t["content"].startswith("<0x")]
    content["pre_tokenizer"] = None
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    return {**content, **changes}


def metaspace(scheme: str) -> Content:
    """As converters of transformers write the files of Llama 2 and Mistral since 2024."""
    kind = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return sentencepiece(normalizer=None, pre_tokenizer=kind)


def unigram() -> Content:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "whale", "e", "a", "▁a"]
    vocabulary = [[name, -float(i)] for i, name in enumerate(names)]
    content = metaspace("always")
    added = [token for token in content["added_tokens"] if token["content"] in SPECIALS]
    return {
        **content,
        "added_tokens": [{**token, "id": len(names) + i} for i, token in enumerate(added)],
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": vocabulary},
    }


MAKERS: dict[str, Maker] = {
    "byte-level": byte_level,
    "qwen": lambda: byte_level(QWEN_PATTERN),
    "gpt2": gpt2,
    "sentencepiece": sentencepiece,
    "metaspace-always": lambda: metaspace("always"),
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-never": lambda: metaspace("never"),
    "unigram": unigram,
}
BYTE_LEVEL = ("byte-level", "qwen", "gpt2")


@pytest.fixture(scope="module")
def contents() -> dict[str, Content]:
    return {name: make() for name, make in MAKERS.items()}


def write(content: Content, directory: Path, config: Content | None = None) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory / "tokenizer.json")


@pytest.fixture(params=MAKERS, scope="module")
def case(
    request: pytest.FixtureRequest, contents: dict[str, Content], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Content, Tokenizer]:
    content = contents[request.param]
    file = write(content, tmp_path_factory.mktemp("hf"))
    return request.param, content, open_tokenizer("huggingface", file)


@pytest.mark.parametrize("specials", [False, True])
def test_ids_are_those_of_the_library(case: tuple[str, Content, Tokenizer], specials: bool):
    _, content, tokenizer = case
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.encode_special_tokens = not specials
    ids = tokenizer.encode(TEXT, specials=specials)
    assert ids.dtype == np.int32
    assert ids.tolist() == library.encode(TEXT, add_special_tokens=False).ids
    assert bool(set(tokenizer.specials.values()) & set(ids.tolist())) == specials
    for text, each in zip(["", "<s>", "a  b"], tokenizer.encode_batch(["", "<s>", "a  b"], specials), strict=True):
        np.testing.assert_array_equal(each, tokenizer.encode(text, specials))


def test_the_bytes_of_text_come_back(case: tuple[str, Content, Tokenizer]):
    name, _, tokenizer = case
    text = TEXT if name in BYTE_LEVEL else PLAIN
    texts = [
        text,
        "",
        "a",
        "a b",
        "\n a",
        "é🐋",
        *([" a", "  ", " "] if name in (*BYTE_LEVEL, "sentencepiece") else []),
    ]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode_bytes(ids) == text.encode()
        assert tokenizer.decode_bytes([tokenizer.bos, *ids, tokenizer.eos]) == text.encode()
        extra = tokenizer.token_bytes[ids].sum() - len(text.encode())
        assert extra in ((0,) if name in (*BYTE_LEVEL, "metaspace-never") else (0, 1))


def test_the_bytes_of_text_with_specials_come_back(case: tuple[str, Content, Tokenizer]):
    name, _, tokenizer = case
    text = "<s>Hello there</s>" + TEXT if name in BYTE_LEVEL else "<s>Hello there</s>go on<|eot_id|>and <s>on"
    ids = tokenizer.encode(text, specials=True)
    assert tokenizer.bos == ids[0]
    assert tokenizer.decode_bytes(ids, specials=True) == text.encode()


def test_pieces_encode_as_the_whole_text_does(case: tuple[str, Content, Tokenizer]):
    name, _, tokenizer = case
    text = TEXT * 4 + "a line\nand more!\n\nx\n/y\n" * 3000
    cut = list(tokenizer.pieces(text))
    assert "".join(cut) == text
    assert (len(cut) > 2) == (name in BYTE_LEVEL)
    np.testing.assert_array_equal(np.concatenate(tokenizer.encode_batch(cut)), tokenizer.encode(text))


def test_a_saved_tokenizer_loads_as_the_same(case: tuple[str, Content, Tokenizer], tmp_path: Path):
    _, _, tokenizer = case
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    for again in (load(path), open_tokenizer("huggingface", str(tmp_path))):
        for name in ("kind", "digest", "bos", "eos", "vocab_size", "stop_ids", "specials"):
            assert getattr(again, name) == getattr(tokenizer, name)
        for specials in (False, True):
            np.testing.assert_array_equal(again.encode(TEXT, specials), tokenizer.encode(TEXT, specials))


def test_the_digest_is_that_of_the_content(contents: dict[str, Content], tmp_path: Path):
    digests = [open_tokenizer("huggingface", write(c, tmp_path / n)).digest for n, c in contents.items()]
    assert len(set(digests)) == len(contents)
    content = json.loads(json.dumps(contents["byte-level"]))
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tokenizer.json").write_text(json.dumps(content, indent=2))
    assert open_tokenizer("huggingface", str(elsewhere)).digest == digests[0]


def test_a_damaged_saved_file_is_refused(contents: dict[str, Content], tmp_path: Path):
    path = tmp_path / "t.json"
    open_tokenizer("huggingface", write(contents["byte-level"], tmp_path)).save(path)
    text = path.read_text()
    for damaged in (text[:-100], text.replace("the", "hte", 1), text.replace('"eos"', '"eso"')):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(DataError, match=r"t\.json is not a tokenizer"):
            load(path)


def test_truncation_and_padding_of_the_file_are_left_out(contents: dict[str, Content], tmp_path: Path):
    library = tokenizers.Tokenizer.from_str(json.dumps(contents["byte-level"]))
    library.enable_truncation(5)
    library.enable_padding(length=50)
    tokenizer = open_tokenizer("huggingface", write(content_of(library), tmp_path))
    text = "the whale " * 90
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [len(ids) < 20 for ids in tokenizer.encode_batch(["a", text])] == [True, False]


def test_document_tokens_are_those_of_the_configuration(contents: dict[str, Content], tmp_path: Path):
    config = {"bos_token": {"content": "<|eot_id|>"}, "eos_token": "<s>"}
    tokenizer = open_tokenizer("huggingface", write(contents["byte-level"], tmp_path, config))
    assert (tokenizer.bos, tokenizer.eos) == (tokenizer.specials["<|eot_id|>"], tokenizer.specials["<s>"])
    assert tokenizer.stop_ids == {tokenizer.eos, tokenizer.specials["<|eot_id|>"]}


def test_without_a_token_that_begins_documents_that_of_the_end_does(contents: dict[str, Content], tmp_path: Path):
    content = json.loads(json.dumps(contents["gpt2"]))
    content["added_tokens"] = [{**t, "content": "<|endoftext|>"} for t in content["added_tokens"][:1]]
    tokenizer = open_tokenizer("huggingface", write(content, tmp_path, {"bos_token": None}))
    assert tokenizer.bos == tokenizer.eos == content["added_tokens"][0]["id"]


def test_a_document_token_is_special_whatever_the_file_calls_it(contents: dict[str, Content], tmp_path: Path):
    content = json.loads(json.dumps(contents["byte-level"]))
    for token in content["added_tokens"]:
        token["special"] = False
    tokenizer = open_tokenizer("huggingface", write(content, tmp_path))
    ids = tokenizer.encode("a</s>b")
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == "a</s>b"
    assert tokenizer.token_bytes[tokenizer.eos] == 0


@pytest.mark.parametrize(
    ("config", "why"),
    [(None, "no token that ends a document"), ({"eos_token": "<end>"}, "no token <end>"), ([], "cannot be read")],
)
def test_a_tokenizer_without_an_end_of_text_is_refused(
    contents: dict[str, Content], tmp_path: Path, config: Any, why: str
):
    content = {**contents["byte-level"], "added_tokens": []}
    file = write(content, tmp_path, config)
    with pytest.raises(DataError, match=rf"data\.tokenizer_file: .*{why}") as caught:
        open_tokenizer("huggingface", file)
    assert "\n" not in str(caught.value)


LOSSY = {
    "Lowercase": {"normalizer": {"type": "Lowercase"}},
    "Whitespace": {"pre_tokenizer": {"type": "Whitespace"}},
    "WordLevel": {"model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}},
    "single bytes": {"pre_tokenizer": None},
}


@pytest.mark.parametrize("what", LOSSY)
def test_a_tokenizer_that_loses_bytes_is_refused(contents: dict[str, Content], tmp_path: Path, what: str):
    file = write({**contents["byte-level"], **LOSSY[what]}, tmp_path)
    with pytest.raises(DataError, match=rf"data\.tokenizer_file: .*cannot be used: .*{what}"):
        open_tokenizer("huggingface", file)


def test_a_vocabulary_without_some_byte_is_refused(contents: dict[str, Content], tmp_path: Path):
    for name, byte in (("byte-level", "Ā"), ("sentencepiece", "<0x41>")):
        content = json.loads(json.dumps(contents[name]))
        content["model"]["vocab"]["@@"] = content["model"]["vocab"].pop(byte)
        with pytest.raises(DataError, match=f"no token for the byte {byte}"):
            open_tokenizer("huggingface", write(content, tmp_path))


def test_a_vocabulary_in_which_text_becomes_a_special_is_refused(tmp_path: Path):
    file = write(sentencepiece(spells_specials=True), tmp_path)
    with pytest.raises(DataError, match=r"text that spells <.*> becomes it"):
        open_tokenizer("huggingface", file)


def test_a_special_that_is_a_whole_word_of_the_model_is_refused(contents: dict[str, Content], tmp_path: Path):
    content = json.loads(json.dumps(contents["gpt2"]))
    names = {token["content"]: token["id"] for token in content["added_tokens"]}
    model = {**content["model"], "ignore_merges": True, "vocab": {**content["model"]["vocab"], **names}}
    open_tokenizer("huggingface", write({**content, "model": model}, tmp_path))  # "<s>" is three words there
    content["pre_tokenizer"]["use_regex"] = False
    with pytest.raises(DataError, match=r"text that spells .* becomes it"):
        open_tokenizer("huggingface", write({**content, "model": model}, tmp_path))


def test_ranks_of_llama_3_are_refused_with_the_kind_to_use(tmp_path: Path):
    write_ranks(train_byte_level(300), tmp_path / "tokenizer.model")
    for kind in ("huggingface", "bpe"):
        with pytest.raises(DataError, match=r"data\.tokenizer_file: .*use data\.tokenizer llama3"):
            open_tokenizer(kind, str(tmp_path / "tokenizer.model"))


def test_a_bpe_of_ours_is_a_tokenizer_json_too(tmp_path: Path):
    ours = train_bpe([mixed_text(20_000, seed=0)], 400)
    ours.save(tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer("huggingface", str(tmp_path))
    assert (tokenizer.bos, tokenizer.eos) == (ours.bos, ours.eos)
    np.testing.assert_array_equal(tokenizer.encode(TEXT), ours.encode(TEXT))
