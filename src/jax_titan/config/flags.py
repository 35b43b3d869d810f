"""The command line's flags, read into a draft."""

import contextlib
import io
from collections.abc import Mapping, Sequence

from jax_titan.config.draft import Draft
from jax_titan.config.fields import FIELDS, Value, config_of, unknown_field, values_of
from jax_titan.config.parser import parse
from jax_titan.config.problems import show
from jax_titan.config.sections import Config


def read_flags(draft: Draft, arguments: Sequence[str]) -> None:
    """Read the command line into the draft.

    tyro gives the values their types. It stops at the first that it cannot read, so then each is read once
    more by its own field, which finds every problem and can name the way out.
    """
    flags = _split_flags(draft, arguments)
    typed = _typed_by_tyro(config_of(draft.values), flags)
    for name, text in flags.items():
        draft.set(name, lambda item, text=text: typed[item.name] if typed else item.from_text(text))


def _split_flags(draft: Draft, arguments: Sequence[str]) -> dict[str, str]:
    """Texts by field; of a flag given twice the last counts, so that scripts can put their own behind a base.

    A value may begin with a dash; one that begins with two must be joined by `=`.
    """
    flags: dict[str, str] = {}
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        if not argument.startswith("--") or argument == "--":
            draft.problems.append(f"{show(argument)}: not a flag; write --section.field value")
            continue
        name, joined, text = argument[2:].partition("=")
        name = name.replace("-", "_")
        has_value = bool(joined) or bool(waiting and not waiting[-1].startswith("--"))
        if has_value and not joined:
            text = waiting.pop()
        if name not in FIELDS:
            draft.problems.append(unknown_field(name))
        elif not has_value:
            draft.refuse(name, f"{name}: the value is missing; write --{name} {FIELDS[name].default or 'VALUE'}")
        else:
            flags[name] = text
    return flags


def _typed_by_tyro(default: Config, flags: Mapping[str, str]) -> dict[str, Value] | None:
    """All values with the flags over `default`, or None when one of them has the wrong type."""
    if not flags:
        return None
    try:
        arguments = [f"--{name}={text}" for name, text in flags.items()]
        # It prints some errors in spite of `console_outputs`; ours follow, all of them.
        with contextlib.redirect_stderr(io.StringIO()):
            return values_of(parse(Config, default, arguments, console_outputs=False))
    except SystemExit:
        return None
