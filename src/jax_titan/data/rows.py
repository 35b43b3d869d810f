"""Rows of T tokens cut from a split: which there are, and what each holds. `packing` has the other kind.

The documents of a split are one stream of tokens, end to end, and row r is tokens [r T, (r + 1) T) of it: found by
arithmetic, nothing to plan and nothing to save.

Shapes: B rows asked for, T tokens of a row.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jax_titan.data.store import Split, TokenStore

type Batch = dict[str, np.ndarray]
"""What a model reads, each [B, T].

    tokens     int32    the input; 0 in padding
    targets    int32    the token after it, 0 where there is none
    segments   int32    which document of the row, from 1; 0 is padding
    positions  int32    place in the document, from the row's start if it began before; 0 in padding
    weights    float32  1 where the target is scored, else 0

An input whose next token begins another document has no target. So each token of a document but its first
(bos) is a target exactly once an epoch. It is scored unless it belongs to a prompt.
"""

DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "segments": np.int32,
    "positions": np.int32,
    "weights": np.float32,
}


class Rows(Protocol):
    """The rows of one epoch of one split."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def pack(self, rows: np.ndarray) -> Batch:
        """Rows by number, int64 [B]; a number past the last is a row of padding."""
        ...


@dataclass(frozen=True)
class SplitRows:
    """Documents end to end, cut anywhere: no padding but at the end.

    Args:
        store: the tokens.
        split: "train" or "validation".
        sequence_length: T.
    """

    store: TokenStore
    split: Split
    sequence_length: int

    @property
    def count(self) -> int:
        inputs = max(self.store.tokens(self.split) - 1, 0)  # the last token has no next one
        return -(-inputs // self.sequence_length)

    def pack(self, rows: np.ndarray) -> Batch:
        stream, offsets = self.store.stream(self.split), self.store.offsets(self.split)
        begin_B1 = np.asarray(rows, np.int64)[:, None] * self.sequence_length
        place_BU = begin_B1 + np.arange(self.sequence_length + 1)  # U = T + 1: the inputs, and one token more
        document_BU = np.searchsorted(offsets, place_BU, side="right") - 1
        token_BU = stream[np.minimum(place_BU, len(stream) - 1)].astype(np.int32)

        place_BT, document_BT = place_BU[:, :-1], document_BU[:, :-1]
        is_text_BT = place_BT < len(stream)
        # Past the stream's end lies a document that does not exist: the last token has no target either.
        has_target_BT = is_text_BT & (document_BU[:, 1:] == document_BT)
        position_BT = place_BT - np.maximum(offsets[document_BT], begin_B1)
        segment_BT = document_BT - document_BT[:, :1] + 1
        scored_BT = has_target_BT & self.store.is_scored(self.split, place_BU[:, 1:], document_BT)
        return {
            "tokens": np.where(is_text_BT, token_BU[:, :-1], 0),
            "targets": np.where(has_target_BT, token_BU[:, 1:], 0),
            "segments": np.where(is_text_BT, segment_BT, 0).astype(np.int32),
            "positions": np.where(is_text_BT, position_BT, 0).astype(np.int32),
            "weights": scored_BT.astype(np.float32),
        }
