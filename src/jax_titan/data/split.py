"""The split of a corpus into training and validation documents.

By document, and decided by the text alone: documents in the order of their content's digest validate until
they make up the share asked for. The order is as good as chance, does not depend on the seed of a run, and
stays when documents are added. Equal documents are on one side. A corpus of one document is cut in two, and
its end validates.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from jax_titan.data.corpus import CorpusFile, CorpusSpec, read_documents
from jax_titan.data.errors import DataError
from jax_titan.data.progress import SCANNING, Progress


@dataclass(frozen=True)
class SplitPlan:
    """Which documents go where, in corpus order and after the cut of an only document.

    Args:
        validates: whether each document is for validation, bool [documents].
        text_bytes: UTF-8 bytes of each document, its prompt included, int64 [documents].
        cut_at_byte: where the only document of the corpus is cut; None when there are several, or no
            validation.
    """

    validates: np.ndarray
    text_bytes: np.ndarray
    cut_at_byte: int | None = None

    def bytes_of(self, validates: bool) -> int:
        """UTF-8 bytes of the validation documents, or of the training documents."""
        return int(self.text_bytes[self.validates == validates].sum())


def plan_split(spec: CorpusSpec, files: list[CorpusFile], progress: Progress) -> SplitPlan:
    """Read a corpus once, to find its documents and divide them.

    Args:
        spec: the corpus.
        files: its files.
        progress: told the bytes read of all.

    Returns:
        The plan; with a `validation_fraction` above 0 both sides have a document.

    Raises:
        DataError: what `read_documents` finds wrong, no text at all, or a single character to be cut in two.
    """
    corpus_bytes = sum(file.size_bytes for file in files)
    sizes, digests, last_text = array("q"), bytearray(), b""
    for document in read_documents(files, spec.text_field, spec.prompt_field):
        sizes.append(document.all_bytes)
        digests += xxhash.xxh3_64_digest(document.prompt + document.text)
        last_text = document.text
        progress(document.corpus_bytes, corpus_bytes, SCANNING)
    if not sizes:
        raise DataError(f"data.path: {spec.path} holds no text, only empty documents; give it some")

    text_bytes = np.array(sizes, np.int64)
    fraction = spec.validation_fraction
    if not fraction:
        return SplitPlan(np.zeros(len(sizes), bool), text_bytes)
    if len(sizes) > 1:
        return SplitPlan(choose_validation(text_bytes, np.frombuffer(digests, ">u8"), fraction), text_bytes)
    if spec.prompt_field:
        raise DataError(
            f"data.path: {spec.path} holds a single document with a prompt, which cannot be cut in two; give "
            "more, or set data.validation_fraction to 0"
        )
    cut = cut_byte(last_text, fraction)
    if cut is None:
        raise DataError(
            f"data.path: {spec.path} holds a single character, too little to keep some for validation; "
            "give more text, or set data.validation_fraction to 0"
        )
    return SplitPlan(np.array([False, True]), np.array([cut, len(last_text) - cut]), cut)


def choose_validation(text_bytes: np.ndarray, digests: np.ndarray, fraction: float) -> np.ndarray:
    """Choose the validation documents of several.

    Documents larger than the whole share come after all others, the smallest first: one of three books should
    not leave a third of the text untrained when a short one will do.

    Args:
        text_bytes: sizes, int64 [documents].
        digests: of the contents, uint64 [documents].
        fraction: the share of all bytes to reach.

    Returns:
        Whether each document validates, bool [documents]: at least one does, and at least one does not.
    """
    share_bytes = fraction * text_bytes.sum()
    order = np.lexsort((np.arange(len(digests)), digests, np.maximum(text_bytes, share_bytes)))
    chosen = int(np.searchsorted(text_bytes[order].cumsum(), share_bytes)) + 1
    while chosen < len(order) and digests[order[chosen]] == digests[order[chosen - 1]]:
        chosen += 1  # a model must not be asked what it has read
    validates = np.zeros(len(order), bool)
    validates[order[: min(chosen, len(order) - 1)]] = True
    return validates


def cut_byte(text: bytes, fraction: float) -> int | None:
    """Where an only document is cut in two.

    Args:
        text: its UTF-8 bytes.
        fraction: the share of them that its end should have.

    Returns:
        The byte at which the end begins: after the line end nearest to the share, if that makes the end no
        more than twice as long as asked, else at the nearest character. None if there is no second character.
    """
    aim = round(len(text) * (1 - fraction))
    reach = min(aim, len(text) - aim)
    before = text.rfind(b"\n", max(aim - reach, 0), aim) + 1  # 0 when there is none
    after = text.find(b"\n", max(aim - 1, 0), aim + reach) + 1
    line_ends = [at for at in (before, after) if 0 < at < len(text)]
    characters = [at for at in _near(aim, len(text)) if text[at] & 0xC0 != 0x80]  # not amid a character
    return min(line_ends or characters, key=lambda at: abs(at - aim), default=None)


def _near(aim: int, length: int) -> Iterator[int]:
    """Places strictly inside, as far from the aim as a character of UTF-8 may be long."""
    yield from range(max(aim - 4, 1), min(aim + 5, length))
