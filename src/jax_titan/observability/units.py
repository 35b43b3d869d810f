"""Quantities as a person reads them: `248 ms`, `3 h 12 min`, `1.50 GB`, `12,345`. For display only: records
and summaries hold plain numbers in the unit that their name states.
"""

from __future__ import annotations

import math


def seconds_text(seconds: float) -> str:
    """A duration in at most two units: `248 ms`, `8.13 s`, `12 min 5 s`, `3 h 12 min`, `2 d 3 h`."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0.9995:  # below what rounds to 1000 ms
        return f"{significant_text(seconds * 1e3)} ms"
    if seconds < 99.95:
        return f"{significant_text(seconds)} s"
    if round(seconds) < 3600:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    if round(seconds / 60) < 24 * 60:
        return "{} h {} min".format(*divmod(round(seconds / 60), 60))
    return "{} d {} h".format(*divmod(round(seconds / 3600), 24))


def bytes_text(count: float) -> str:
    """A size in decimal units: `512 B`, `1.50 GB`."""
    for unit_bytes, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * unit_bytes:
            return f"{significant_text(count / unit_bytes)} {unit}"
    return f"{count:.0f} B"


def count_text(count: float) -> str:
    """A whole number with thousands separators."""
    return f"{count:,.0f}"


def significant_text(value: float) -> str:
    """Three significant digits, or all those of the whole part: `1.03`, `0.0123`, `1,230`, `1.5e-07`."""
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(value)
    if magnitude == 0 or not 1e-4 <= magnitude < 1e6:
        return f"{value:.3g}"
    rounded = float(f"{magnitude:.3g}")  # 9.999 is 10.0, not 10.00
    decimals = max(0, 2 - math.floor(math.log10(rounded)))
    return f"{value:,.{decimals}f}"
