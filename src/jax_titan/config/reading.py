"""Reading a configuration: the layers in their order, then the fields with each other."""

import os
from collections.abc import Mapping, Sequence

from jax_titan.config.checks import contradictions
from jax_titan.config.draft import Draft
from jax_titan.config.fields import Value, config_of
from jax_titan.config.flags import read_flags
from jax_titan.config.problems import ConfigError
from jax_titan.config.sections import Config
from jax_titan.config.sources import read_source, read_toml


def load(source: str, overrides: Sequence[str]) -> Config:
    """Read a preset or a TOML file, put the command line over it, and check all of it.

    Args:
        source: name of a preset, or path of a TOML file.
        overrides: command-line arguments, `--section.field value` or `--section.field=value`.
    Returns: a complete configuration, `run.dir` and `data.path` resolved.
    Raises: ConfigError with every problem of the file, the flags, and the fields with each other.
    """
    draft = Draft()
    name = read_source(draft, source)
    if os.path.basename(source) == "config.toml":  # the record of a run, wherever it has moved to
        draft.values["run.dir"] = os.path.dirname(source) or "."
    read_flags(draft, overrides)
    draft.values |= _resolved_paths(draft.values, name)
    draft.problems += contradictions(draft)
    if draft.problems:
        raise ConfigError(draft.problems)
    return config_of(draft.values)


def from_toml(text: str, where: str) -> Config:
    """Read a TOML text on its own: names, types and limits, but not the fields with each other.

    That makes it right for the record of a run, whose corpus may have moved since. `where` names the text in
    problems.
    """
    draft = Draft()
    read_toml(draft, text, where)
    if draft.problems:
        raise ConfigError(draft.problems)
    return config_of(draft.values)


def _resolved_paths(values: Mapping[str, Value], name: str) -> dict[str, Value]:
    """Paths without ~, the run directory filled in, the corpus independent of the working directory."""
    return {
        "run.dir": os.path.expanduser(str(values["run.dir"])) or os.path.join("runs", name),
        "data.path": absolute(str(values["data.path"])),
        "data.mixture": absolute_mixture(str(values["data.mixture"])),
        "data.tokenizer_file": absolute(str(values["data.tokenizer_file"])),
        "model.init_from": absolute(str(values["model.init_from"])),
        "data.cache": os.path.expanduser(str(values["data.cache"])),
    }


def absolute(path: str) -> str:
    """A path that means the same in every working directory; an empty one stays empty."""
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def absolute_mixture(text: str) -> str:
    """Every path of `data.mixture` made absolute; parts that are no PATH=WEIGHT stay as they are."""
    parts = [part.strip().rpartition("=") for part in text.split(",")]
    return ",".join(f"{absolute(path.strip())}={weight.strip()}" if path else weight for path, _, weight in parts)
