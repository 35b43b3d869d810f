"""The record of a run: its configuration as a file, and what of it must stay when the run is resumed."""

import json

from jax_titan.config.fields import FIELDS, SECTIONS, Value, values_of
from jax_titan.config.problems import show
from jax_titan.config.reading import absolute, absolute_mixture
from jax_titan.config.sections import Config

# A resumed run must agree with itself in these; all other fields may change from attempt to attempt.
FIXED: tuple[str, ...] = tuple(
    name
    for name, item in FIELDS.items()
    if (item.section in ("model", "data", "optimizer") and name != "data.cache")
    or name in ("run.seed", "train.batch", "train.sequence_length")
)


def to_toml(config: Config) -> str:
    """Every field of a configuration as TOML, which `from_toml` reads back exactly."""
    lines = [
        "# The complete configuration of a run, as it was started: defaults, preset, file and flags.",
        "# To continue the run: jax-titan train this file.",
    ]
    values = values_of(config)
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        lines += [
            f"{item.key} = {_toml(values[item.name])}" for item in FIELDS.values() if item.section == section
        ]
    return "\n".join(lines) + "\n"


def _toml(value: Value) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's, except for DEL, which only TOML escapes
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return show(value) if isinstance(value, bool) else repr(value)


def fixed_differences(saved: Config, now: Config) -> list[str]:
    """One line for each field that a run must keep but that differs between its record and the present."""
    before, after = values_of(saved), values_of(now)
    for values in (before, after):
        for path in ("data.path", "data.tokenizer_file", "model.init_from"):
            values[path] = absolute(str(values[path]))
        values["data.mixture"] = absolute_mixture(str(values["data.mixture"]))
    return [
        f"{name}: {show(before[name])} in the run, {show(after[name])} now"
        for name in FIXED
        if before[name] != after[name]
    ]
