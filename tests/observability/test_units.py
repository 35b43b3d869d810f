"""Quantities read as a person would write them, also where rounding crosses a unit."""

from __future__ import annotations

import math

import pytest

from jax_titan.observability.units import bytes_text, count_text, seconds_text, significant_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.00123, "1.23 ms"),
        (0.248, "248 ms"),
        (0.99951, "1.00 s"),
        (8.13, "8.13 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (11_520, "3 h 12 min"),
        (86_399, "1 d 0 h"),
        (183_600, "2 d 3 h"),
        (math.inf, "inf s"),
    ],
)
def test_durations(seconds: float, text: str):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999.6, "1.00 kB"),
        (1.5e9, "1.50 GB"),
        (999.6e6, "1.00 GB"),
        (2e15, "2,000 TB"),
    ],
)
def test_sizes(count: float, text: str):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.034, "1.03"),
        (-0.01234, "-0.0123"),
        (1234.5, "1,234"),
        (1.5e-7, "1.5e-07"),
        (2.5e9, "2.5e+09"),
        (math.nan, "nan"),
    ],
)
def test_three_significant_digits(value: float, text: str):
    assert significant_text(value) == text


def test_counts_have_thousands_separators():
    assert count_text(1234567) == "1,234,567"
