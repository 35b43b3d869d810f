"""How a problem is worded: on one line, naming the value that is wrong and the way out."""

import difflib
from collections.abc import Iterable, Sequence

INT64_MAX = 2**63 - 1  # TOML promises no more
_NEAR = 0.51  # of difflib's ratio: seqlen is near sequence_length (0.57), lr is not near layers (0.5)


class ConfigError(Exception):
    """The configuration cannot be used; `problems` has one line for each reason."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def show(value: object) -> str:
    """A value as a problem line shows it: on one line, short, and never failing."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "a table"
        case list():
            return "an array"
        case int() if abs(value) > INT64_MAX:
            return "an integer of more than 64 bits"  # Python refuses to print very long ones
    text = repr(value) if isinstance(value, str | int | float) else str(value)
    return text if len(text) <= 80 else text[:79] + "…"


def show_name(name: str) -> str:
    """A name as a problem line shows it: as it is, unless that would not be readable."""
    return name if name and name.isprintable() and len(name) <= 80 else show(name)


def nearest(word: str, known: Iterable[str], least: float = _NEAR) -> str:
    """The known word most like this one, or nothing when all are less like it than `least`."""
    near = difflib.get_close_matches(word, [choice for choice in known if choice], n=1, cutoff=least)
    return near[0] if near else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or nothing."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""
