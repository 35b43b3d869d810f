"""Corpora to prepare."""

import json
from pathlib import Path

import numpy as np
import pytest

from jax_titan.data.store import CorpusSpec, TokenStore, prepare

ALPHABET = "abcdefghij .,\n\té漢🐋"


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def random_texts(count: int, longest: int, seed: int = 0) -> list[str]:
    """Texts of 1 to `longest` characters, of one to four bytes each."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(ALPHABET), rng.integers(1, longest + 1))) for _ in range(count)]


@pytest.fixture
def texts() -> list[str]:
    return random_texts(60, longest=90)


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", texts)


@pytest.fixture
def store(corpus: Path, tmp_path: Path) -> TokenStore:
    return prepare(CorpusSpec(str(corpus), validation_fraction=0.2), tmp_path / "cache")
