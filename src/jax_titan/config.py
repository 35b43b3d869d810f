"""The configuration: every field of a run, how it is read, and everything that can be wrong with it.

A section is a frozen dataclass, a field is one line of it: type, default, help, limits. `FIELDS` is that same
information as a table, and the only thing the readers below know: command-line flags, TOML, help and resume
all walk it. Values come in layers, each over the one before: defaults, preset, file, flags.

Bad input is met here, before a device is touched, and met completely: one line a problem, all of them
together. This room imports no JAX.
"""

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

type Value = bool | int | float | str

INT64_MAX = 2**63 - 1  # TOML promises no more
BYTE_VOCABULARY = 258  # 256 bytes, begin of document, end of document: the least a tokenizer here can have


@dataclass(frozen=True)
class Limits:
    """What a value of a field may be, beyond its type."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    supported: int | None = None  # larger values have a meaning, but nothing implements them yet


def option[T](default: T, help: str, **limits: float) -> T:
    """One field of a section: its default, its help (with the unit), and the names of `Limits`."""
    return cast("T", field(default=default, metadata={"help": help, "limits": Limits(**limits)}))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Run:
    """Where the run lives and what makes it random."""

    dir: str = option("", "run directory (empty: runs/NAME, NAME being the preset or the file)")
    seed: int = option(0, "seed of the parameters and of the order of the data", at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True)
class Model:
    """The model, a decoder of the Llama family."""

    layers: int = option(4, "decoder layers", at_least=1)
    dim: int = option(256, "width of the residual stream", at_least=1)
    heads: int = option(4, "query heads", at_least=1)
    kv_heads: int = option(2, "key and value heads, each shared by heads / kv_heads query heads", at_least=1)
    head_dim: int = option(0, "width of a head (0: dim / heads)", at_least=0)
    ffn_dim: int = option(688, "width inside the feed-forward block", at_least=1)
    vocab_size: int = option(0, "tokens in the vocabulary (0: as many as the tokenizer has)", at_least=0)
    rope_theta: float = option(500000.0, "base of the rotary position frequencies", above=0)
    norm_eps: float = option(1e-5, "added to the mean square in RMSNorm", above=0)
    init_std: float = option(0.02, "standard deviation of the initial weights", above=0)
    tied: bool = option(False, "use the embedding as the output head too")
    dtype: Literal["bfloat16", "float32", "float64"] = option(
        "float32", "number format of the computation (float64 is for tests)"
    )


@dataclass(frozen=True)
class Data:
    """The text, and how it becomes tokens."""

    path: str = option(
        "", "text or .jsonl file, or directory of them (empty: the corpus that comes with jax-titan)"
    )
    tokenizer: Literal["bytes", "bpe"] = option("bpe", "bytes, or a BPE trained on the corpus")
    vocab_size: int = option(2048, "tokens in the vocabulary of that BPE", at_least=1)
    text_field: str = option("text", "name of the field that holds the text in JSON lines")
    validation_fraction: float = option(
        0.05, "part of the text kept for evaluation, in whole documents (0: none)", at_least=0, below=1
    )
    cache: str = option("", "directory of token stores (empty: jax-titan/data in $XDG_CACHE_HOME or ~/.cache)")


@dataclass(frozen=True)
class Train:
    """The length of the run and the size of a step."""

    steps: int = option(300, "steps of the whole run; the learning-rate schedule spans them", at_least=1)
    batch: int = option(24, "sequences a step, over all microbatches", at_least=1)
    microbatches: int = option(8, "equal parts in which a step's batch passes through the model", at_least=1)
    sequence_length: int = option(128, "tokens a sequence", at_least=1)
    stop_after: int = option(
        0,
        "end this attempt after that step with a checkpoint, as if the job's time were up (0: never)",
        at_least=0,
    )


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its learning rate."""

    learning_rate: float = option(3e-3, "learning rate after the warm-up", above=0)
    schedule: Literal["cosine", "constant"] = option("cosine", "course of the learning rate after the warm-up")
    warmup_steps: int = option(20, "steps over which the learning rate rises from 0", at_least=0)
    final_fraction: float = option(
        0.1, "learning rate at the end of the cosine, as a part of learning_rate", at_least=0, at_most=1
    )
    b1: float = option(0.9, "decay of the mean of gradients", at_least=0, below=1)
    b2: float = option(0.95, "decay of the mean of squared gradients", at_least=0, below=1)
    eps: float = option(1e-8, "added to the root of the mean square", above=0)
    weight_decay: float = option(0.1, "decoupled weight decay, times the learning rate", at_least=0)
    clip_norm: float = option(1.0, "largest global gradient norm, scaled down beyond (0: no limit)", at_least=0)


@dataclass(frozen=True)
class Eval:
    """Loss on the validation split."""

    every: int = option(50, "steps between evaluations (0: only at the end)", at_least=0)
    batches: int = option(4, "batches an evaluation (0: all of the validation split)", at_least=0)


@dataclass(frozen=True)
class Checkpoint:
    """What is saved to continue from."""

    every: int = option(100, "steps between checkpoints (0: only when the run stops)", at_least=0)
    keep: int = option(3, "latest checkpoints that stay on disk", at_least=1)


@dataclass(frozen=True)
class Parallel:
    """How devices share the work."""

    layout: Literal["mpmd", "spmd"] = option(
        "mpmd", "mpmd: a pipeline of programs; spmd: one program on all devices"
    )
    data: int = option(1, "parts of the batch, each on devices of its own", at_least=1)
    fsdp: int = option(1, "parts of every parameter, gathered for use", at_least=1, supported=1)
    tensor: int = option(1, "parts of every matrix product", at_least=1, supported=1)
    context: int = option(1, "parts of every sequence", at_least=1, supported=1)


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of layout mpmd; spmd has none and ignores it."""

    stages: int = option(4, "consecutive parts of the model, each on devices of its own", at_least=1)
    schedule: Literal["gpipe", "1f1b"] = option("1f1b", "order of forward and backward passes in a stage")
    chunks: int = option(1, "virtual stages a device holds", at_least=1, supported=1)


@dataclass(frozen=True)
class Platform:
    """The hardware."""

    name: Literal["", "cpu", "gpu", "cuda", "rocm", "tpu"] = option("", "JAX platform (empty: the one JAX picks)")
    devices: int = option(0, "virtual devices of platform cpu (0: as many as the layout needs)", at_least=0)


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    platform: Platform = Platform()

    @property
    def run_dir(self) -> Path:
        """Directory of this run's config.toml, events.jsonl and checkpoints."""
        return Path(self.run.dir)

    @property
    def cache_dir(self) -> Path:
        """Directory of the token stores, by the XDG convention unless `data.cache` names one."""
        if self.data.cache:
            return Path(self.data.cache)
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(home) / "jax-titan" / "data"

    @property
    def units(self) -> int:
        """Units of the model that a pipeline may cut between: embed, the layers, head."""
        return self.model.layers + 2

    @property
    def devices_needed(self) -> int:
        """Devices the layout occupies."""
        inside = self.parallel.data * self.parallel.fsdp * self.parallel.tensor * self.parallel.context
        return inside * self.pipeline.stages if self.parallel.layout == "mpmd" else inside


# ---------------------------------------------------------------------------------------- the table of fields


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
            return _BOOLEANS[text] if self.type is bool else self.type(text)
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


_BOOLEANS = MappingProxyType({"true": True, "false": False})
_TYPE_NAMES = MappingProxyType(
    {bool: "a boolean; use true or false", int: "an integer", float: "a number", str: "a string"}
)
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

# A resumed run must agree with itself in these; all other fields may change from attempt to attempt.
FIXED: tuple[str, ...] = tuple(
    name
    for name, item in FIELDS.items()
    if (item.section in ("model", "data", "optimizer") and name != "data.cache")
    or name in ("run.seed", "train.batch", "train.sequence_length")
)


def _values(config: Config) -> dict[str, Value]:
    return {name: getattr(getattr(config, item.section), item.key) for name, item in FIELDS.items()}


def _config(values: Mapping[str, Value]) -> Config:
    sections: dict[str, dict[str, Value]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        sections[FIELDS[name].section][FIELDS[name].key] = value
    return Config(**{section: cls(**sections[section]) for section, cls in SECTIONS.items()})


# ----------------------------------------------------------------------------------------- words of a problem

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


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, [choice for choice in known if choice], n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]}?" if near else ""


def _shown_name(name: str) -> str:
    return name if name and name.isprintable() and len(name) <= 80 else show(name)


def _is_storable(text: str) -> bool:
    """Whether the run's config.toml, which is UTF-8, and the file system can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _unknown_field(name: str) -> str:
    """The problem of a name that is no field. Right key in the wrong section counts as near."""
    section, _, key = name.rpartition(".")
    namesakes = [known for known, item in FIELDS.items() if item.key == key]
    if namesakes:
        near = difflib.get_close_matches(name, namesakes, n=1, cutoff=0)
    elif section and section not in SECTIONS:
        near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=_NEAR)
    else:
        candidates = {item.key: known for known, item in FIELDS.items() if section in ("", item.section)}
        near = [candidates[close] for close in difflib.get_close_matches(key, candidates, n=1, cutoff=_NEAR)]
    way_out = f"did you mean {near[0]}?" if near else "`jax-titan train --help` lists all fields"
    return f"{_shown_name(name)}: unknown; {way_out}"


# ------------------------------------------------------------------------------------------------ the readers


@dataclass
class _Draft:
    """A configuration while it is read: the good values so far, the fields that have none, and why."""

    values: dict[str, Value] = field(default_factory=lambda: {name: item.default for name, item in FIELDS.items()})
    bad: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def set(self, name: str, read: Callable[[Field], Value], where: str = "") -> None:
        """Take the value that `read` finds for a field, or note the problem."""
        try:
            value = read(FIELDS[name])
            if objection := FIELDS[name].objection(value):
                raise ValueError(objection)
        except ValueError as error:
            self.refuse(name, f"{where}{name}: {error}")
        else:
            self.values[name] = value

    def refuse(self, name: str, problem: str) -> None:
        self.bad.add(name)
        self.problems.append(problem)


def load(source: str, overrides: Sequence[str]) -> Config:
    """Read a preset or a TOML file, put the command line over it, and check all of it.

    Args:
        source: name of a preset, or path of a TOML file.
        overrides: command-line arguments, `--section.field value` or `--section.field=value`.
    Returns: a complete configuration, `run.dir` and `data.path` resolved.
    Raises: ConfigError with every problem of the file, the flags, and the fields with each other.
    """
    draft = _Draft()
    name = _read_source(draft, source)
    _read_flags(draft, overrides)
    draft.values |= _resolved_paths(draft.values, name)
    draft.problems += _contradictions(draft)
    if draft.problems:
        raise ConfigError(draft.problems)
    return _config(draft.values)


def from_toml(text: str, where: str) -> Config:
    """Read a TOML text on its own: names, types and limits, but not the fields with each other.

    That makes it right for the record of a run, whose corpus may have moved since. `where` names the text in
    problems.
    """
    draft = _Draft()
    _read_toml(draft, text, where)
    if draft.problems:
        raise ConfigError(draft.problems)
    return _config(draft.values)


def presets() -> dict[str, str]:
    """TOML text of every preset by its name."""
    files = (resources.files("jax_titan") / "presets").iterdir()
    texts = {
        item.name.removesuffix(".toml"): item.read_text("utf-8") for item in files if item.name.endswith(".toml")
    }
    return dict(sorted(texts.items()))


def _read_source(draft: _Draft, source: str) -> str:
    """Read a preset or file into the draft; returns the name of runs made from it."""
    if source not in presets() and (source.endswith(".toml") or "/" in source or os.path.exists(source)):
        text = _file_text(draft, source)
        if text is not None:
            _read_toml(draft, text, _shown_name(source))
        return Path(source).stem
    _read_preset(draft, source, "")
    return source


def _file_text(draft: _Draft, path: str) -> str | None:
    shown = _shown_name(path)
    if os.path.isdir(path):
        record = os.path.join(path, "config.toml")
        way_out = f"did you mean {record}?" if os.path.exists(record) else "name a preset or a TOML file"
        draft.problems.append(f"{shown}: is a directory; {way_out}")
        return None
    try:
        return Path(path).read_text("utf-8-sig")
    except FileNotFoundError:
        draft.problems.append(f"{shown}: no such file{suggestion(Path(path).stem, presets())}")
    except UnicodeDecodeError:
        draft.problems.append(f"{shown}: not a TOML file, which is UTF-8 text")
    except (OSError, ValueError) as error:
        draft.problems.append(f"{shown}: cannot be read ({getattr(error, 'strerror', None) or error})")
    return None


def _read_preset(draft: _Draft, name: str, where: str) -> None:
    known = presets()
    if name in known:
        _read_toml(draft, known[name], f"preset {name}")
    else:
        way_out = f"{suggestion(name, known)} (known: {', '.join(known)}, or a FILE.toml)"
        draft.problems.append(f"{where}preset: {show(name)} is unknown{way_out}")


def _read_toml(draft: _Draft, text: str, where: str) -> None:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        draft.problems.append(_syntax_problem(error, text, where))
        return
    where = f"{where}: "
    preset = document.pop("preset", None)
    if isinstance(preset, str):
        _read_preset(draft, preset, where)
    elif preset is not None:
        draft.problems.append(f"{where}preset: {show(preset)} is not a string")
    for section, content in document.items():
        if section not in SECTIONS:
            draft.problems.append(where + _unknown_section(section, content))
        elif not isinstance(content, dict):
            draft.problems.append(f"{where}{section}: {show(content)} is not a section; write [{section}]")
        else:
            for key, value in content.items():
                _read_key(draft, f"{section}.{key}", value, where)


def _read_key(draft: _Draft, name: str, value: object, where: str) -> None:
    if name in FIELDS:
        draft.set(name, lambda item: item.from_toml(value), where)
    else:
        draft.problems.append(where + _unknown_field(name))


def _unknown_section(section: str, content: object) -> str:
    if not isinstance(content, dict):
        return _unknown_field(section)
    way_out = suggestion(section, SECTIONS) or f"; sections are {', '.join(SECTIONS)}"
    return f"{_shown_name(section)}: unknown section{way_out}"


def _syntax_problem(error: Exception, text: str, where: str) -> str:
    """`file:line: what`; tomllib tells the line only inside its message, and not at all for the last one."""
    message = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "a value is too long or too deep"
    found = re.search(r" \(at line (\d+), column \d+\)$", message)
    line = found[1] if found else text.count("\n") + 1
    return f"{where}:{line}: {message.removesuffix(found[0] if found else ' (at end of document)')}"


def _read_flags(draft: _Draft, arguments: Sequence[str]) -> None:
    """Read the command line into the draft.

    tyro gives the values their types. It stops at the first that it cannot read, so then each is read once
    more by its own field, which finds every problem and can name the way out.
    """
    flags = _split_flags(draft, arguments)
    typed = _typed_by_tyro(_config(draft.values), flags)
    for name, text in flags.items():
        draft.set(name, lambda item, text=text: typed[item.name] if typed else item.from_text(text))


def _split_flags(draft: _Draft, arguments: Sequence[str]) -> dict[str, str]:
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
            draft.problems.append(_unknown_field(name))
        elif not has_value:
            draft.refuse(name, f"{name}: the value is missing; write --{name} {FIELDS[name].default or 'VALUE'}")
        else:
            flags[name] = text
    return flags


# ------------------------------------------------------------------------------------------------ tyro's part


def _typed_by_tyro(default: Config, flags: Mapping[str, str]) -> dict[str, Value] | None:
    """All values with the flags over `default`, or None when one of them has the wrong type."""
    if not flags:
        return None
    try:
        arguments = [f"--{name}={text}" for name, text in flags.items()]
        return _values(_tyro(Config, default, arguments, console_outputs=False))
    except SystemExit:
        return None


def print_help(command: str, description: str, source: str = "", sections: Iterable[str] = SECTIONS) -> None:
    """Print the fields of some sections with help and defaults, those of a preset if `source` is one."""
    draft = _Draft()
    if source in presets():
        _read_preset(draft, source, "")
    config = _config(draft.values)
    shown = [(name, SECTIONS[name], field(default=getattr(config, name))) for name in sections]
    part = dataclasses.make_dataclass("Part", shown, frozen=True)
    try:
        _tyro(part, part(), ["--help"], prog=command, description=description)
    except SystemExit:
        return  # tyro leaves this way after printing


def _tyro[T](cls: type[T], default: T, arguments: list[str], **settings: Any) -> T:
    import tyro
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
        StructConstructorSpec,
        StructFieldSpec,
        StructTypeInfo,
    )

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def boolean(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        # tyro's own booleans are True|False, ours are those of TOML
        if info.type is not bool:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="true|false",
            instance_from_str=lambda texts: _BOOLEANS[texts[0]],
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [show(value)],
            choices=tuple(_BOOLEANS),
        )

    @registry.struct_rule
    def section(info: StructTypeInfo) -> StructConstructorSpec | None:
        # tyro would look for help in docstrings, ours is in the table
        for name, cls in SECTIONS.items():
            if info.type is cls:
                fields = [item for item in FIELDS.values() if item.section == name]
                specs = [
                    StructFieldSpec(item.key, item.annotation, getattr(info.default, item.key), item.help)
                    for item in fields
                ]
                return StructConstructorSpec(instantiate=cls, fields=tuple(specs))
        return None

    return tyro.cli(
        cls,
        default=default,
        args=arguments,
        registry=registry,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
        **settings,
    )


# -------------------------------------------------------------------------- fields that contradict each other


class _Unusable(Exception):
    """A check read a field that has a problem of its own."""


class _Guarded:
    """A section in which reading a bad field raises `_Unusable`."""

    def __init__(self, section: str, draft: _Draft):
        self._section, self._draft = section, draft

    def __getattr__(self, key: str) -> Value:
        name = f"{self._section}.{key}"
        if name in self._draft.bad:
            raise _Unusable(name)
        return self._draft.values[name]


def _contradictions(draft: _Draft) -> list[str]:
    """Problems between the fields; a check that needs a bad field is left out, all others run."""
    config = Config(**{section: cast(Any, _Guarded(section, draft)) for section in SECTIONS})
    problems = []
    for check in CHECKS:
        try:
            problem = check(config)
        except _Unusable:
            continue
        if problem is not None:
            problems.append(problem)
    return problems


def _head_width(c: Config) -> str | None:
    m = c.model
    if m.head_dim == 0 and m.dim % m.heads:
        dim, heads = m.dim, m.heads
        return f"model.dim: {dim} is not a multiple of the {heads} model.heads; change it, or set model.head_dim"
    return None


def _head_is_even(c: Config) -> str | None:
    m = c.model
    if m.head_dim % 2:
        return f"model.head_dim: {m.head_dim} is odd, but rotary positions turn pairs; use an even number"
    if m.head_dim == 0 and m.dim % m.heads == 0 and (m.dim // m.heads) % 2:
        width = m.dim // m.heads
        return f"model.dim: {m.dim} makes heads of {width}, but rotary positions turn pairs; use an even width"
    return None


def _heads_share_keys(c: Config) -> str | None:
    heads, kv_heads = c.model.heads, c.model.kv_heads
    if heads % kv_heads:
        return f"model.kv_heads: {kv_heads} does not divide the {heads} model.heads; use a divisor of {heads}"
    return None


def _model_knows_all_tokens(c: Config) -> str | None:
    tokens = c.data.vocab_size if c.data.tokenizer == "bpe" else BYTE_VOCABULARY
    if 0 < c.model.vocab_size < tokens:
        have, what = c.model.vocab_size, f"the {tokens} tokens of the {c.data.tokenizer} tokenizer"
        return f"model.vocab_size: {have} is less than {what}; use 0 or at least {tokens}"
    return None


def _bpe_holds_all_bytes(c: Config) -> str | None:
    if c.data.tokenizer == "bpe" and c.data.vocab_size < BYTE_VOCABULARY:
        least = f"{BYTE_VOCABULARY} (256 bytes, begin and end of document)"
        return f"data.vocab_size: {c.data.vocab_size} is too small for a BPE; use at least {least}"
    return None


def _corpus_is_there(c: Config) -> str | None:
    if not c.data.path:
        return None
    from jax_titan.data.corpus import find_files  # the one place that knows what a corpus may be
    from jax_titan.data.errors import DataError

    try:
        files = find_files(c.data.path)
    except DataError as error:
        return str(error)
    if not any(file.size_bytes for file in files):
        return f"data.path: {c.data.path} is empty; give text, or nothing for the bundled corpus"
    return None


def _text_field_has_a_name(c: Config) -> str | None:
    return (
        None
        if c.data.text_field
        else "data.text_field: '' is empty; name the field of the JSON lines, such as text"
    )


def _run_dir_can_be_made(c: Config) -> str | None:
    for path in (c.run_dir, *c.run_dir.parents):
        if os.path.isdir(path):
            return None
        if os.path.exists(path):
            return f"run.dir: {show(str(path))} is a file; name a directory"
    return None


def _microbatches_are_equal(c: Config) -> str | None:
    batch, parts = c.train.batch, c.train.microbatches
    if batch % parts:
        return f"train.batch: {batch} is not a multiple of the {parts} train.microbatches; change one of them"
    return None


def _replicas_are_equal(c: Config) -> str | None:
    batch, parts, replicas = c.train.batch, c.train.microbatches, c.parallel.data
    if batch % parts == 0 and (batch // parts) % replicas:
        have = f"{batch // parts} sequences of a microbatch (train.batch / train.microbatches)"
        return f"parallel.data: {replicas} does not divide the {have}; change one of them"
    return None


def _data_parallel_is_spmd(c: Config) -> str | None:
    if c.parallel.data > 1 and c.parallel.layout == "mpmd":
        way_out = "use 1, or parallel.layout spmd"
        return f"parallel.data: {c.parallel.data} is not supported yet with layout mpmd; {way_out}"
    return None


def _stages_have_units(c: Config) -> str | None:
    if c.parallel.layout == "mpmd" and c.pipeline.stages > c.units:
        units = f"{c.units} units of the model (embed, {c.model.layers} layers, head)"
        way_out = f"use at most {c.units} or more model.layers"
        return f"pipeline.stages: {c.pipeline.stages} is more than the {units}; {way_out}"
    return None


def _virtual_devices_are_of_cpu(c: Config) -> str | None:
    if c.platform.devices and c.platform.name not in ("", "cpu"):
        have, name = c.platform.devices, c.platform.name
        return f"platform.devices: {have} is for platform cpu, but platform.name is {name}; use 0"
    return None


def _devices_suffice(c: Config) -> str | None:
    if 0 < c.platform.devices < c.devices_needed:
        have, need = c.platform.devices, c.devices_needed
        return f"platform.devices: {have} is less than the {need} the layout needs; use 0 or at least {need}"
    return None


CHECKS: tuple[Callable[[Config], str | None], ...] = (
    _head_width,
    _head_is_even,
    _heads_share_keys,
    _model_knows_all_tokens,
    _bpe_holds_all_bytes,
    _corpus_is_there,
    _text_field_has_a_name,
    _run_dir_can_be_made,
    _microbatches_are_equal,
    _replicas_are_equal,
    _data_parallel_is_spmd,
    _stages_have_units,
    _virtual_devices_are_of_cpu,
    _devices_suffice,
)


# ---------------------------------------------------------------------------------------- the record of a run


def _resolved_paths(values: Mapping[str, Value], name: str) -> dict[str, Value]:
    """Paths without ~, the run directory filled in, the corpus independent of the working directory."""
    directory, corpus, cache = (
        os.path.expanduser(str(values[path])) for path in ("run.dir", "data.path", "data.cache")
    )
    return {
        "run.dir": directory or os.path.join("runs", name),
        "data.path": _absolute(corpus),
        "data.cache": cache,
    }


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def to_toml(config: Config) -> str:
    """Every field of a configuration as TOML, which `from_toml` reads back exactly."""
    lines = [
        "# The complete configuration of a run, as it was started: defaults, preset, file and flags.",
        "# To continue the run: jax-titan train this file.",
    ]
    values = _values(config)
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
    before, after = _values(saved), _values(now)
    for values in (before, after):
        values["data.path"] = _absolute(str(values["data.path"]))
    return [
        f"{name}: {show(before[name])} in the run, {show(after[name])} now"
        for name in FIXED
        if before[name] != after[name]
    ]
