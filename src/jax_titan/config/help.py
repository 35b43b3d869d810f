"""The help of the command line: fields with their meaning and their values before any flag."""

from collections.abc import Iterable
from dataclasses import field, make_dataclass

from jax_titan.config.draft import Draft
from jax_titan.config.fields import SECTIONS, config_of
from jax_titan.config.parser import parse
from jax_titan.config.sources import read_preset


def print_help(command: str, description: str, source: str = "", sections: Iterable[str] = SECTIONS) -> None:
    """Print the fields of some sections with help and defaults, those of a preset if `source` is one."""
    draft = Draft()
    read_preset(draft, source, "")  # the defaults stay when it is none
    config = config_of(draft.values)
    shown = [(name, SECTIONS[name], field(default=getattr(config, name))) for name in sections]
    part = make_dataclass("Part", shown, frozen=True)
    try:
        parse(part, part(), ["--help"], prog=command, description=description)
    except SystemExit:
        return  # tyro leaves this way after printing
