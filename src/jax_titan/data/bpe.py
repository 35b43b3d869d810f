"""Byte-level BPE of our own: trained on the corpus, or read again from what was trained."""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import tokenizers
import xxhash

from jax_titan.data.errors import DataError
from jax_titan.data.tokenizer_base import BOS, EOS, Tokenizer, byte_characters

SMALLEST_VOCAB = 256 + 2
"""Every byte and the two specials: what byte-level BPE needs before its first merge."""

# The split that Llama 3 uses (its reference tokenizer, class Tokenizer, `pat_str`): contractions, words with
# the space before them, numbers by three digits, punctuation, line ends. It cuts every text completely, hence
# loses nothing.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}{1,256}|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]{1,256}[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class BpeTokenizer(Tokenizer):
    """Byte-level BPE: the split of Llama 3, then merges of bytes; the two specials are the last ids.

    Args:
        library: a Hugging Face tokenizer with a byte-level BPE model, our split, no normalizer, and both
            specials added.

    Raises:
        DataError: it is not such a tokenizer.

    Source: Sennrich et al. 2016, arXiv 1508.07909 (BPE); Radford et al. 2019, section 2.2 (byte level).
    """

    kind = "bpe"

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        content: dict[str, Any] = json.loads(library.to_str())
        if not is_ours(content):
            raise DataError("tokenizer: it is not byte-level BPE with our split; use data.tokenizer huggingface")
        bos, eos = library.token_to_id(BOS), library.token_to_id(EOS)
        special_ids = set(library.get_added_tokens_decoder())
        if bos not in special_ids or eos not in special_ids:
            raise DataError(f"tokenizer: it lacks {BOS} or {EOS}; train one with data.tokenizer bpe")
        # Otherwise the library would turn text that spells a special into the special.
        library.encode_special_tokens = True
        self._library = library
        self._content = content
        self._names = [cast(str, library.id_to_token(i)) for i in range(library.get_vocab_size())]
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        self._token_texts = [
            b"" if i in special_ids else bytes(byte_of[c] for c in name) for i, name in enumerate(self._names)
        ]
        self.bos, self.eos = cast(int, bos), cast(int, eos)
        self.specials = {self._names[i]: i for i in special_ids}

    @cached_property
    def digest(self) -> str:
        # Of what the ids depend on, not of the library's file format, which may change with its version.
        merges = [" ".join(m) if isinstance(m, list) else m for m in self._content["model"]["merges"]]
        what = [self.kind, 1, SPLIT_PATTERN, self._names, merges]
        return xxhash.xxh3_128_hexdigest(json.dumps(what).encode())

    def describe(self) -> str:
        return f"byte-level BPE, {self.vocab_size:,} tokens"

    def _encode_ordinary(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.array(encoding.ids, np.int32)
            for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def _serialized(self) -> str:
        return self._library.to_str()


def is_ours(content: dict[str, Any]) -> bool:
    """Whether a `tokenizer.json` holds byte-level BPE with our split.

    Args:
        content: the file, parsed.
    """
    if content["model"].get("type") != "BPE" or content.get("normalizer"):
        return False
    match content.get("pre_tokenizer"):
        case {"pretokenizers": [{"pattern": {"Regex": pattern}}, {"type": "ByteLevel", "use_regex": False}]}:
            return pattern == SPLIT_PATTERN
        case _:
            return False


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Train byte-level BPE; the same texts give the same tokenizer.

    Args:
        texts: the text to learn from, streamed.
        vocab_size: tokens wanted, the two specials included.

    Returns:
        A tokenizer of `vocab_size` tokens, or of fewer where no pair of tokens is left that occurs twice:
        read the number from its `vocab_size`.

    Raises:
        DataError: `vocab_size` has no room for all bytes and the specials.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise DataError(
            f"data.vocab_size: {vocab_size} is too small for bpe; "
            f"use {SMALLEST_VOCAB} (256 bytes and 2 specials) or more"
        )
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        min_frequency=2,  # a merge seen once is a memory of the text, not a regularity
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    # After training, so that they are the last ids and play no part in it.
    library.add_special_tokens([BOS, EOS])
    return BpeTokenizer(library)
