"""Text that is hard on tokenizers, and a byte-level BPE trained on it."""

import base64
from pathlib import Path

import numpy as np
import tokenizers

from jax_titan.data.tokenizer_base import byte_characters

SPELLED = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_7|>", "<s>", "</s>"]
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""As Meta publishes it."""

_WHITE = list(" \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u2003\u2028\u2029\u3000\ufeff")
_WORDS = "the whale wasn't I'LL They'Re naïve Straße ΑΒΓ мир שלום ﷺ hello the of and".split()
_CODE = ["def f(x):\n    return x[::-1]\n", "\tif (a != b) { c += 0x1F; }\r\n", "x = {'k': [1, 2.5e-3]}  # no\n\n"]
_EMOJI = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇳🇱", "🐋", "❤️", "\u200d", "☎️1️⃣"]
_COMBINING = ["e\u0301\u0323", "\u0301", "ก็", "각", "नि", "Z͑ͫ̓ͪ", "\u200f\u202e"]


def mixed_text(size: int, seed: int) -> str:
    """Code, scripts, emoji, numbers, runs of white space, spelled specials, stray marks and line ends.

    Args:
        size: bytes of UTF-8 it has at least.
        seed: of the choice.
    """
    rng = np.random.default_rng(seed)
    makers = [
        lambda: " ".join(rng.choice(_WORDS, rng.integers(1, 12))),
        lambda: str(rng.choice(_CODE)),
        lambda: "".join(chr(c) for c in rng.integers(0x4E00, 0x9FFF, rng.integers(1, 9))),
        lambda: "".join(rng.choice(_EMOJI, rng.integers(1, 5))),
        lambda: "".join(map(str, rng.integers(0, 10, rng.integers(1, 15)))) + str(rng.choice(["", ".", "٣", "½"])),
        lambda: str(rng.choice(_WHITE)) * int(rng.choice([1, 2, 3, 63, 64, 65, 127, 128, 129, 300])),
        lambda: "".join(rng.choice(_WHITE, rng.integers(1, 200))),
        lambda: str(rng.choice(SPELLED)),
        lambda: "".join(rng.choice(_COMBINING, rng.integers(1, 4))),
        lambda: str(rng.choice(["\r", "\n", "\r\n", "\x85", "\n\n", " \n", "\n ", "!\n\n", "...\r\n"])),
        lambda: str(rng.choice(list("!?.,;:-_/\\|()[]{}<>@#$%^&*+=~`\"'"))) * int(rng.integers(1, 40)),
        lambda: chr(p if (p := int(rng.integers(0, 0x110000 - 0x800))) < 0xD800 else p + 0x800),
        lambda: str(rng.choice(["a", "漢", "é"])) * int(rng.integers(1, 300)),
    ]
    parts, made = [], 0
    while made < size:
        part = makers[rng.integers(len(makers))]() + str(rng.choice(["", "", " "]))
        parts.append(part)
        made += len(part.encode())
    return "".join(parts)


def train_byte_level(vocab_size: int, pattern: str = LLAMA3_PATTERN) -> tokenizers.Tokenizer:
    """Byte-level BPE trained on mixed text, without specials."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=byte_characters(), show_progress=False
    )
    library.train_from_iterator(mixed_text(150_000, seed=0).splitlines(keepends=True), trainer)
    return library


def write_ranks(library: tokenizers.Tokenizer, path: Path) -> dict[bytes, int]:
    """Write byte-level BPE as a file of ranks.

    Returns:
        The ranks.
    """
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    ranks = {bytes(byte_of[c] for c in name): i for name, i in library.get_vocab().items()}
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    path.write_text("".join(lines))
    return ranks
