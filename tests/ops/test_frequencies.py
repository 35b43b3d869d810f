"""Rotary frequencies: Llama 3.1's rule against itself written out, case by case."""

import math

import numpy as np
import pytest

from jax_titan.ops import RopeScaling
from jax_titan.ops.frequencies import rope_frequencies


def by_wavelength(head_size, theta, factor, low, high, original):
    """The rule as the model card's code tells it: by wavelengths in tokens, one component at a time."""
    result = []
    for i in range(head_size // 2):
        frequency = 1.0 / theta ** (2 * i / head_size)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            result.append(frequency)
        elif wavelength > original / low:
            result.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return result


@pytest.mark.parametrize(
    ("head_size", "factor", "low", "high", "original"),
    [(128, 8.0, 1.0, 4.0, 8192), (64, 32.0, 1.0, 4.0, 8192), (32, 3.0, 2.0, 5.0, 100), (128, 8.0, 1.0, 1.5, 4096)],
)
def test_the_rule_is_that_of_llama_3_1(head_size, factor, low, high, original):
    found = rope_frequencies(head_size, 500_000.0, RopeScaling(factor, low, high, original))
    expected = by_wavelength(head_size, 500_000.0, factor, low, high, original)
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    plain = rope_frequencies(head_size, 500_000.0)
    assert found[0] == plain[0]  # the fastest turns stay
    assert found[-1] == pytest.approx(plain[-1] / factor, rel=1e-14)  # the slowest are stretched wholly
    assert np.any((found < plain * 0.999) & (found > plain / factor * 1.001))  # and some lie between


def test_a_factor_of_one_changes_no_bit():
    np.testing.assert_array_equal(rope_frequencies(64, 1e4, RopeScaling(1.0)), rope_frequencies(64, 1e4))
