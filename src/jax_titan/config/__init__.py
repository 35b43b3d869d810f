"""The configuration: every field of a run, how it is read, and everything that can be wrong with it.

Values come in layers, each over the one before: defaults, preset, file, flags. Bad input is met here, before a
device is touched, and met completely: one line a problem, all of them together. This room imports no JAX.

Read in this order: `sections` (the fields, as dataclasses), `fields` (the same as a table, which all readers
walk), `reading` (`load`, from first layer to last), then what it calls: `draft`, `sources` (presets and TOML),
`flags` and `parser` (the command line), `checks` (fields that contradict each other). `record` is what a run
keeps of it, `help` what a user sees of it, `problems` how it says what is wrong.
"""

from jax_titan.config.checks import CHECKS
from jax_titan.config.fields import FIELDS, SECTIONS, Field, Value
from jax_titan.config.help import print_help
from jax_titan.config.problems import ConfigError, show, suggestion
from jax_titan.config.reading import from_toml, load
from jax_titan.config.record import FIXED, fixed_differences, to_toml
from jax_titan.config.sections import (
    KEPT_NAMES,
    Checkpoint,
    Config,
    Data,
    Eval,
    Model,
    Optimizer,
    Parallel,
    Pipeline,
    Platform,
    Run,
    Train,
)
from jax_titan.config.sources import presets

__all__ = [
    "CHECKS",
    "FIELDS",
    "FIXED",
    "KEPT_NAMES",
    "SECTIONS",
    "Checkpoint",
    "Config",
    "ConfigError",
    "Data",
    "Eval",
    "Field",
    "Model",
    "Optimizer",
    "Parallel",
    "Pipeline",
    "Platform",
    "Run",
    "Train",
    "Value",
    "fixed_differences",
    "from_toml",
    "load",
    "presets",
    "print_help",
    "show",
    "suggestion",
    "to_toml",
]
