"""The table of fields: what the sections say, in the one form that flags, TOML, help and resume all walk."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from jax_titan.config.problems import INT64_MAX, nearest, show, show_name, suggestion
from jax_titan.config.sections import Config, Limits

type Value = bool | int | float | str

BOOLEANS = MappingProxyType({"true": True, "false": False})
_TYPE_NAMES = MappingProxyType(
    {bool: "a boolean; use true or false", int: "an integer", float: "a number", str: "a string"}
)


@dataclass(frozen=True)
class Field:
    """One field as every reader sees it; `name` is section.key."""

    name: str
    type: type[bool] | type[int] | type[float] | type[str]
    annotation: Any  # as written in the section: `type`, or the Literal of `choices`
    default: Value
    help: str
    choices: tuple[str, ...]
    limits: Limits

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def key(self) -> str:
        return self.name.partition(".")[2]

    def from_text(self, text: str) -> Value:
        """The value that a flag's text means; raises ValueError with the problem."""
        try:
            return BOOLEANS[text] if self.type is bool else self.type(text)
        except (KeyError, ValueError):
            raise ValueError(self._wrong_type(text)) from None

    def from_toml(self, value: object) -> Value:
        """The value that TOML gave, an integer being good for a float; raises ValueError with the problem."""
        if self.type is float and type(value) is int and abs(value) <= INT64_MAX:
            return float(value)
        if type(value) is not self.type:
            raise ValueError(self._wrong_type(value))
        return cast(Value, value)

    def _wrong_type(self, value: object) -> str:
        return f"{show(value)} is not {_TYPE_NAMES[self.type]}"

    def objection(self, value: Value) -> str | None:
        """What is wrong with a value of the right type, on its own; None when nothing is."""
        shown, limits = show(value), self.limits
        if self.choices and value not in self.choices:
            known = ", ".join(choice or "''" for choice in self.choices)
            return f"{shown} is unknown{suggestion(str(value), self.choices)} (known: {known})"
        if isinstance(value, str):
            return None if _is_storable(value) else f"{shown} has a NUL or is not Unicode text"
        if isinstance(value, int) and abs(value) > INT64_MAX:  # before isfinite, which overflows beyond floats
            return f"{shown} is out of range"
        if not math.isfinite(value):
            return f"{shown} is not a finite number"
        if limits.at_least is not None and value < limits.at_least:
            return f"{shown} is too small; use {limits.at_least} or more"
        if limits.above is not None and value <= limits.above:
            return f"{shown} is too small; use more than {limits.above}"
        if limits.at_most is not None and value > limits.at_most:
            return f"{shown} is too large; use {limits.at_most} or less"
        if limits.below is not None and value >= limits.below:
            return f"{shown} is too large; use less than {limits.below}"
        if limits.supported is not None and value > limits.supported:
            return f"{shown} is not supported yet; use {limits.supported}"
        return None


def _is_storable(text: str) -> bool:
    """Whether the run's config.toml, which is UTF-8, and the file system can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


SECTIONS: Mapping[str, type] = MappingProxyType(get_type_hints(Config))


def _table() -> dict[str, Field]:
    table = {}
    for section, cls in SECTIONS.items():
        hints = get_type_hints(cls)
        for item in dataclasses.fields(cls):
            hint, name = hints[item.name], f"{section}.{item.name}"
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            kind, about = (str if choices else hint), item.metadata
            table[name] = Field(
                name, kind, hint, cast(Value, item.default), about["help"], choices, about["limits"]
            )
    return table


FIELDS: Mapping[str, Field] = MappingProxyType(_table())


def values_of(config: Config) -> dict[str, Value]:
    """The values of all fields by name."""
    return {name: getattr(getattr(config, item.section), item.key) for name, item in FIELDS.items()}


def config_of(values: Mapping[str, Value]) -> Config:
    """The configuration that has these values."""
    sections: dict[str, dict[str, Value]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        sections[FIELDS[name].section][FIELDS[name].key] = value
    return Config(**{section: cls(**sections[section]) for section, cls in SECTIONS.items()})


def unknown_field(name: str) -> str:
    """The problem of a name that is no field. Right key in the wrong section counts as near."""
    section, _, key = name.rpartition(".")
    namesakes = [known for known, item in FIELDS.items() if item.key == key]
    if namesakes:
        near = nearest(name, namesakes, least=0)
    elif section and section not in SECTIONS:
        near = nearest(name, FIELDS)
    else:
        candidates = {item.key: known for known, item in FIELDS.items() if section in ("", item.section)}
        near = candidates.get(nearest(key, candidates))
    way_out = f"did you mean {near}?" if near else "`jax-titan train --help` lists all fields"
    return f"{show_name(name)}: unknown; {way_out}"
