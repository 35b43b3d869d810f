"""Rotary frequencies, and the rule by which Llama 3.1 stretches them to a longer context."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    """How far a context is stretched, by Llama 3.1's rule.

    A component that turns more than `high_freq_factor` times over the original context stays; one that turns less
    than `low_freq_factor` times turns `factor` times slower; in between the two are blended.

    Args:
        factor: how much slower, 1 for no change.
        low_freq_factor, high_freq_factor: turns over the original context; the first is the smaller.
        original_length: the original context, in tokens.

    Source: the rotary embedding of meta-llama/llama-models (Llama 3.1 and later).
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def stretched(self, frequencies: np.ndarray) -> np.ndarray:
        """The frequencies after the rule, in radians a token."""
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


def rope_frequencies(head_size: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """float64 [head_size / 2]: radians a token of each pair.

    In NumPy and float64, as theta ** x in float32 is off by several units in the last place.
    """
    frequencies = theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    return frequencies if scaling is None or scaling.factor == 1 else scaling.stretched(frequencies)
