"""Tokenizers of Hugging Face: any `tokenizer.json` from whose ids the bytes of the text come back."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import xxhash

from jax_titan.data.errors import DataError
from jax_titan.data.tokenizer_base import BOS, EOS, Tokenizer, byte_characters, pieces

_BOS_NAMES = (BOS, "<s>", "<bos>", "<|startoftext|>", "<|begin▁of▁sentence|>", "<｜begin▁of▁sentence｜>", "[BOS]")
_EOS_NAMES = (EOS, "</s>", "<eos>", "<|endoftext|>", "<|end▁of▁sentence|>", "<｜end▁of▁sentence｜>", "[EOS]")
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")

# Splits in which no word reaches from a line feed between two visible characters to the character behind it.
# (Llama 3; Qwen 2, with single digits. GPT-2's is built into the library.)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS_TO_CUT = {_WORDS + digits + _REST for digits in (r"\p{N}{1,3}", r"\p{N}")}
_CUT = re.compile(r"(?<=\S)\n(?=\S)")

_LOSSLESS_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}

Prefix = Literal["no", "first", "each"]
"""Where the tokenizer puts a space before text: nowhere, before the text, or also behind each added token."""


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer in a `tokenizer.json`, encoded by the library tokenizers.

    Byte-level BPE gives back every text byte by byte. So do tokenizers in the way of sentencepiece with a token
    for each byte, up to what their format cannot tell apart: U+2581 and a space, and for some whether the text
    began with a space. The space that such a tokenizer puts before each text counts in `token_bytes`;
    `decode_bytes` takes it for the one of the text's beginning and leaves it out. A tokenizer that composes
    characters (NFC) gives back composed ones.

    Args:
        content: the `tokenizer.json`, parsed, of a tokenizer that loses no bytes; see `read_tokenizer_json`.
        bos: id of the token that begins documents.
        eos: id of the token that ends them.
    """

    kind = "huggingface"

    def __init__(self, content: dict[str, Any], bos: int, eos: int) -> None:
        content = _with_specials(content, {bos, eos})
        self.bos, self.eos = bos, eos
        self._text = json.dumps(content, ensure_ascii=False)
        self._ordinary = _library(self._text)
        # Otherwise the library would turn text that spells a special into the special.
        self._ordinary.encode_special_tokens = True
        added = self._ordinary.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        special_ids = {i for i, token in added.items() if token.special} | {bos, eos}
        names = {i: name for name, i in self._ordinary.get_vocab(with_added_tokens=True).items()}
        self.specials = {names[i]: i for i in sorted(special_ids)}
        self._token_texts = _token_texts(content, names, {i: token.content for i, token in added.items()})
        for i in special_ids:
            self._token_texts[i] = b""
        self._prefix = _prefix(content)
        self._may_cut = self._prefix == "no" and _may_cut(content)
        self._digest = _digest(content, bos, eos)

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({self.eos, *(self.specials[name] for name in _TURN_ENDS if name in self.specials)})

    def describe(self) -> str:
        return f"Hugging Face tokenizer, {self.vocab_size:,} tokens"

    def pieces(self, text: str) -> Iterator[str]:
        return pieces(text, end=_CUT) if self._may_cut else iter([text])

    def decode_bytes(self, ids: Iterable[int] | np.ndarray, specials: bool = False) -> bytes:
        if self._prefix == "no":
            return super().decode_bytes(ids, specials)
        texts = self._spelled_texts if specials else self._token_texts
        special_ids = set(self.specials.values())
        parts, begins = [], True
        for i in self._known(ids):
            if i in self._added_ids or i in special_ids:
                parts.append(texts[i])
                # Without their spelling, specials are taken for borders of texts that were encoded one by one.
                begins = self._prefix == "each" or (i in special_ids and not specials)
            else:
                parts.append(texts[i].removeprefix(b" ") if begins else texts[i])
                begins = False
        return b"".join(parts)

    def _encode_ordinary(self, texts: Sequence[str]) -> list[np.ndarray]:
        return _encode(self._ordinary, texts)

    def _encode_with_specials(self, texts: Sequence[str]) -> list[np.ndarray]:
        # The library's own way: added tokens may ask for white space around them.
        return _encode(self._special, texts)

    @cached_property
    def _special(self) -> tokenizers.Tokenizer:
        return _library(self._text)

    def _serialized(self) -> str:
        head = json.dumps(
            {"kind": self.kind, "version": 1, "digest": self.digest, "bos": self.bos, "eos": self.eos}
        )
        return f'{head[:-1]}, "tokenizer": {self._text}}}'

    @classmethod
    def of_saved(cls, content: dict[str, Any]) -> "HuggingFaceTokenizer":
        """The tokenizer in a file that `save` wrote.

        Args:
            content: the file, parsed.

        Raises:
            Exception: the file is damaged; the library has no kind of error of its own.
        """
        tokenizer = cls(content["tokenizer"], content["bos"], content["eos"])
        if tokenizer.digest != content["digest"]:
            raise DataError("its content does not match its digest")
        return tokenizer


def read_tokenizer_json(content: dict[str, Any], path: Path) -> HuggingFaceTokenizer:
    """The tokenizer in a `tokenizer.json`.

    Which tokens begin and end documents is read from a `tokenizer_config.json` beside it; without one, the added
    tokens are searched for well-known names. Where no token begins documents, the one that ends them does.

    Args:
        content: the file, parsed.
        path: its name.

    Raises:
        DataError: the tokenizer loses bytes, text can become a special, the library cannot read it, or no token
            ends documents.
    """
    field = f"data.tokenizer_file: {path}"
    try:
        if why := _loses(content):
            raise DataError(f"{field} cannot be used: {why}; use a tokenizer that keeps every byte")
        ids = _ids(content)
        bos_name, eos_name = _document_tokens(content, path.with_name("tokenizer_config.json"))
        if eos_name is None or eos_name not in ids:
            what = "no token that ends a document" if eos_name is None else f"no token {eos_name}"
            raise DataError(f"{field} has {what}; put a tokenizer_config.json with its eos_token beside it")
        eos = ids[eos_name]
        bos = ids.get(bos_name, eos) if bos_name else eos
        tokenizer = HuggingFaceTokenizer(content, bos, eos)
        if spelled := _made_of_text(tokenizer, content["model"]):
            raise DataError(f"{field} cannot be used: text that spells {min(spelled)} becomes it; use another")
        return tokenizer
    except DataError:
        raise
    except Exception as error:  # a part of the file is missing, or the library's error, which has no type
        raise DataError(f"{field} cannot be read ({error!r}); get it again") from None


def _library(text: str) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(text)
    # A file may ask for either; ids of a corpus are to be whole and nothing else.
    library.no_truncation()
    library.no_padding()
    return library


def _encode(library: tokenizers.Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    encoded = library.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encoded]


def _document_tokens(content: dict[str, Any], config_file: Path) -> tuple[str | None, str | None]:
    """Spelling of what begins and of what ends documents, as far as somebody says."""
    names = {token["content"] for token in content.get("added_tokens") or ()}
    config = _config(config_file)
    found = []
    for key, known in (("bos_token", _BOS_NAMES), ("eos_token", _EOS_NAMES)):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        found.append(token or next((name for name in known if name in names), None))
    return found[0], found[1]


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("not an object")
        return config
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer_file: {file} cannot be read ({error}); get it again") from None


def _loses(content: dict[str, Any]) -> str:
    """Why bytes of a text would be lost; empty if none are."""
    model = content["model"]
    for part in _chain(content.get("normalizer"), "normalizers"):
        if not _keeps_text(part):
            return f"its normalizer {part.get('type')} changes text"
    for part in _chain(content.get("pre_tokenizer"), "pretokenizers"):
        splits = part.get("type") in ("Split", "Punctuation") and part.get("behavior") != "Removed"
        if not splits and part.get("type") not in _LOSSLESS_PRE_TOKENIZERS:
            return f"its pre-tokenizer {part.get('type')} drops text"
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        return f"its model {model['type']} has no token for some text"
    if model.get("dropout"):
        return "its dropout gives other ids each time"
    if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        return "its marks of words hide the space between them"
    vocabulary = _ids(content)
    if _is_byte_level(content):
        needed = byte_characters()
    elif model.get("byte_fallback"):
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return "it has no tokens for single bytes"
    missing = [name for name in needed if name not in vocabulary]
    return f"it has no token for the byte {missing[0]}" if missing else ""


def _keeps_text(normalizer: dict[str, Any]) -> bool:
    match normalizer:
        case {"type": "NFC" | "Prepend"} | {"type": "Replace", "pattern": {"String": " "}}:
            return True
        case _:
            return False


def _chain(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the list of those that it is a sequence of."""
    if not part:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for each in part[inner] for step in _chain(each, inner)]


def _ids(content: dict[str, Any]) -> dict[str, int]:
    """Ids by name, of the model's tokens and the added ones."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # with scores, in the order of ids
        vocabulary = {name: i for i, (name, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}


def _made_of_text(tokenizer: Tokenizer, model: dict[str, Any]) -> set[str]:
    """Specials that text may become though nobody asked for specials, for the model itself makes them."""
    if model.get("type", "BPE") == "Unigram":
        made = {name for name, _ in model["vocab"]}
    else:
        made = {"".join(merge) for merge in _merges(model)}
    # Some models also take a whole word that is in the vocabulary, whatever merges say.
    ids = tokenizer.encode_batch(list(tokenizer.specials))
    made |= {name for name, each in zip(tokenizer.specials, ids, strict=True) if tokenizer.specials[name] in each}
    return made.intersection(tokenizer.specials)


def _merges(model: dict[str, Any]) -> list[list[str]]:
    # Files write a merge in two ways.
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]


def _with_specials(content: dict[str, Any], ids: set[int]) -> dict[str, Any]:
    """The same with these tokens among the specials, whatever the file calls them."""
    added = [
        {**token, "special": token["special"] or token["id"] in ids} for token in content.get("added_tokens") or ()
    ]
    return {**content, "added_tokens": added}


def _pre_tokenizer(content: dict[str, Any], kind: str) -> dict[str, Any] | None:
    parts = _chain(content.get("pre_tokenizer"), "pretokenizers")
    return next((part for part in parts if part.get("type") == kind), None)


def _is_byte_level(content: dict[str, Any]) -> bool:
    return _pre_tokenizer(content, "ByteLevel") is not None


def _token_texts(content: dict[str, Any], names: dict[int, str], added: dict[int, str]) -> list[bytes]:
    """The bytes of each token by id; none for an id that no token has."""
    texts = [b""] * (max(names) + 1)
    read = _byte_level_text if _is_byte_level(content) else _sentencepiece_text(_space(content))
    for i, name in names.items():
        texts[i] = added[i].encode() if i in added else read(name)
    return texts


_BYTE_OF = {character: byte for byte, character in enumerate(byte_characters())}


def _byte_level_text(name: str) -> bytes:
    # A name with other characters cannot come of bytes; it is a token that nothing encodes to.
    return bytes(_BYTE_OF[c] for c in name) if all(c in _BYTE_OF for c in name) else name.encode()


def _sentencepiece_text(space: str):
    one_byte = re.compile(r"<0x([0-9A-F]{2})>")

    def read(name: str) -> bytes:
        if found := one_byte.fullmatch(name):
            return bytes([int(found[1], 16)])
        return (name.replace(space, " ") if space else name).encode()

    return read


def _space(content: dict[str, Any]) -> str:
    """The character that stands for a space in tokens; empty where that is a space."""
    if metaspace := _pre_tokenizer(content, "Metaspace"):
        return metaspace["replacement"]
    parts = _chain(content.get("normalizer"), "normalizers")
    return next((part["content"] for part in parts if part["type"] == "Replace"), "")


def _prefix(content: dict[str, Any]) -> Prefix:
    if any(part["type"] == "Prepend" for part in _chain(content.get("normalizer"), "normalizers")):
        return "each"
    byte_level = _pre_tokenizer(content, "ByteLevel")
    if byte_level and byte_level.get("add_prefix_space", True):
        return "each"
    if metaspace := _pre_tokenizer(content, "Metaspace"):
        old = "always" if metaspace.get("add_prefix_space", True) else "never"
        kinds: dict[str, Prefix] = {"always": "each", "first": "first", "never": "no"}
        return kinds[metaspace.get("prepend_scheme", old)]
    return "no"


def _may_cut(content: dict[str, Any]) -> bool:
    """Whether text may be cut at a line feed between visible characters: known for the splits known here."""
    for token in content.get("added_tokens") or ():
        if not token["special"] and ("\n" in token["content"] or token["lstrip"] or token["rstrip"]):
            return False
    match _chain(content.get("pre_tokenizer"), "pretokenizers"):
        case [{"type": "ByteLevel"} as byte_level]:
            return byte_level.get("use_regex", True)
        case [{"type": "Split", "pattern": {"Regex": pattern}}, {"type": "ByteLevel", "use_regex": False}]:
            return pattern in _SPLITS_TO_CUT
        case _:
            return False


def _digest(content: dict[str, Any], bos: int, eos: int) -> str:
    # Of what the ids depend on.
    model = {**content["model"], "merges": _merges(content["model"])}
    parts = {key: content.get(key) for key in ("normalizer", "pre_tokenizer", "added_tokens")}
    what = {"kind": "huggingface", "version": 1, "model": model, "bos": bos, "eos": eos, **parts}
    return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())
