"""The command line: one function a subcommand, each importing what it needs when it runs.

`--help` and a wrong configuration therefore never wait for JAX. Answers go to standard output, problems to
standard error, one line each. Exit codes: 0 complete, 75 stopped early and resumable, 1 failed, 2 usage or
configuration.
"""

import codecs
import contextlib
import json
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from jax_titan.config import SECTIONS, Config, ConfigError, load, presets, print_help, show, suggestion

OK, FAILED, USAGE, RESUMABLE = 0, 1, 2, 75


class UsageError(Exception):
    """The command cannot be carried out as given; the text is one line that says why."""


@dataclass(frozen=True)
class Command:
    """A subcommand: how it is called, what it is for, and what does it."""

    usage: str
    summary: str
    example: str
    sections: tuple[str, ...]  # of the configuration, listed in its help
    run: Callable[[list[str]], int]
    details: str = ""  # what its help says of flags that are not fields of the configuration


def train(arguments: list[str]) -> int:
    """Train; the trainer's exit code is the command's. With --dry-run only say what would be done."""
    arguments, dry = _without("--dry-run", arguments)
    if not dry and "--json" in arguments:
        raise UsageError("train: --json is for --dry-run; the record of a run is events.jsonl in its directory")
    arguments, as_json = _without("--json", arguments)
    config = load(*_source_and_flags("train", arguments))
    if dry:
        return _dry_run(config, as_json)
    from jax_titan.data.errors import DataError
    from jax_titan.trainer.errors import RunError
    from jax_titan.trainer.train import train as run

    try:
        return run(config)
    except DataError as error:
        raise UsageError(str(error)) from error
    except RunError as error:
        print(error, file=sys.stderr)
        return FAILED


def _dry_run(config: Config, as_json: bool) -> int:
    from jax_titan.data.errors import DataError
    from jax_titan.trainer.dryrun import DryRun

    try:
        plan = DryRun.of(config)
    except DataError as error:
        raise UsageError(str(error)) from error
    print(json.dumps(plan.to_json(), indent=2) if as_json else "\n".join(plan.lines()))
    return OK


def prepare(arguments: list[str]) -> int:
    """Tokenize the corpus into its store, or find it there, and say what it holds."""
    arguments, as_json = _without("--json", arguments)
    config = load(*_source_and_flags("prepare", arguments))
    facts = _prepared(config)
    print(json.dumps(facts, indent=2) if as_json else _store_text(facts))
    return OK


def _prepared(config: Config) -> dict[str, Any]:
    from jax_titan.data.errors import DataError
    from jax_titan.trainer.corpus import open_store

    try:
        store = open_store(config)
    except DataError as error:
        raise UsageError(str(error)) from error
    tokenizer = config.data.tokenizer
    facts = {
        "directory": [str(directory) for directory in store.directories],
        "tokenizer": tokenizer,
        "vocab_size": store.vocab_size,
    }
    if len(store.directories) == 1:
        facts["directory"] = facts["directory"][0]
    splits = {
        split: {"documents": store.documents(split), "tokens": store.tokens(split)}
        for split in ("train", "validation")
    }
    return facts | splits


def _store_text(facts: dict[str, Any]) -> str:
    rows = {
        split: f"{facts[split]['documents']:,} documents, {facts[split]['tokens']:,} tokens"
        for split in ("train", "validation")
    }
    rows |= {
        "vocabulary": f"{facts['vocab_size']:,} tokens ({facts['tokenizer']})",
        "store": facts["directory"] if isinstance(facts["directory"], str) else ", ".join(facts["directory"]),
    }
    return "\n".join(f"{label:<12}{text}" for label, text in rows.items())


def summarize(arguments: list[str]) -> int:
    """Say what happened in a run."""
    arguments, as_json = _without("--json", arguments)
    for argument in arguments:
        if argument.startswith("-"):
            raise UsageError(f"summarize: {show(argument)} is unknown; the only flag is --json")
    if len(arguments) != 1:
        given = ", ".join(map(show, arguments)) or "none"
        raise UsageError(f"summarize: name one run directory ({given} given), for example runs/llama3-debug")
    from jax_titan.observability.records import to_json
    from jax_titan.observability.summarize import format_summary
    from jax_titan.observability.summarize import summarize as run

    try:
        summary = run(arguments[0])
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    print(to_json(summary) if as_json else format_summary(summary))
    return OK


def generate(arguments: list[str]) -> int:
    """Continue prompts with a run's model; a single one streams to the terminal as it is drawn."""
    arguments, as_json = _without("--json", arguments)
    if not arguments or arguments[0].startswith("-"):
        example = COMMANDS["generate"].example
        raise UsageError(f"generate: name a run directory first, for example: jax-titan {example}")
    run, *flags = arguments
    prompts, options, step = _generate_options(flags)
    from pathlib import Path

    from jax_titan.data.errors import DataError
    from jax_titan.trainer.errors import RunError
    from jax_titan.trainer.sampling import Sampling

    try:
        sampling = Sampling(**options)
    except ValueError as error:
        raise UsageError(f"generate: {error}") from error
    from jax_titan.trainer.generate import Generator

    try:
        generator = Generator.of_run(Path(run), step)
    except (DataError, RunError) as error:
        raise UsageError(str(error)) from error
    tokens: list[list[int]] = [[] for _ in prompts]
    streams = len(prompts) == 1 and not as_json
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    if streams:
        print(prompts[0], end="", flush=True)
    for drawn in generator.stream(prompts, sampling):
        for row, token in zip(tokens, drawn, strict=True):
            if token is not None:
                row.append(token)
        if streams and drawn[0] is not None:
            print(decoder.decode(generator.tokenizer.decode_bytes([drawn[0]])), end="", flush=True)
    if streams:
        print(decoder.decode(b"", final=True))
        return OK
    texts = [generator.tokenizer.decode(row) for row in tokens]
    if as_json:
        rows = zip(prompts, texts, tokens, strict=True)
        print(json.dumps([{"prompt": p, "text": text, "tokens": row} for p, text, row in rows], indent=2))
    else:
        print("\n\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True)))
    return OK


_GENERATE_OPTIONS: Mapping[str, type] = MappingProxyType(
    {"prompt": str, "temperature": float, "top_k": int, "top_p": float, "seed": int, "tokens": int, "step": int}
)

_GENERATE_DETAILS = """\
  --prompt TEXT       text to continue; again for a batch; none is the empty text
  --tokens N          tokens to draw at most, fewer where the text ends (100)
  --temperature T     0 takes the likeliest token; 1 draws as the model says (0.8)
  --top_k K           draw among the K likeliest tokens; 0 is all (0)
  --top_p P           draw among the likeliest that together have P (1)
  --seed N            of the drawing; the same one draws the same text (0)
  --step N            of the checkpoint; the newest otherwise
  --json              prompts, texts and token ids as JSON, once all is drawn
"""


def _generate_options(flags: list[str]) -> tuple[list[str], dict[str, Any], int | None]:
    """The prompts, the options of the sampling and the step, from the flags of `generate`."""
    prompts: list[str] = []
    options: dict[str, Any] = {}
    waiting = list(reversed(flags))
    while waiting:
        flag, joined, text = waiting.pop().partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in _GENERATE_OPTIONS:
            way_out = suggestion(name, _GENERATE_OPTIONS) or f"; flags are {', '.join(_GENERATE_OPTIONS)} and json"
            raise UsageError(f"generate: {show(flag)} is unknown{way_out}")
        if not joined:
            if not waiting:
                raise UsageError(f"generate: --{name}: the value is missing")
            text = waiting.pop()
        try:
            value = _GENERATE_OPTIONS[name](text)
        except ValueError:
            kind = "a whole number" if _GENERATE_OPTIONS[name] is int else "a number"
            raise UsageError(f"generate: --{name}: {show(text)} is not {kind}") from None
        if name == "prompt":
            prompts.append(value)
        else:
            options[name] = value
    return prompts or [""], options, options.pop("step", None)


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "train": Command(
            usage="train PRESET|FILE.toml [--dry-run [--json]]",
            summary="Train a model, or continue its run; makes a run directory.",
            example="train llama3-debug --train.steps 20 --run.dir runs/first",
            sections=tuple(SECTIONS),
            run=train,
            details="--dry-run says what would run where, doing none of it; --json says it as JSON.",
        ),
        "prepare": Command(
            usage="prepare PRESET|FILE.toml [--json]",
            summary="Tokenize the corpus into its store (train does it when it is missing).",
            example="prepare llama3-debug --data.path corpus.txt --data.vocab_size 4096",
            sections=("data",),
            run=prepare,
        ),
        "generate": Command(
            usage="generate RUN --prompt TEXT [--prompt TEXT ...] [options]",
            summary="Continue prompts with the model of a run, from a checkpoint of any layout.",
            example='generate runs/llama3-debug --prompt "Call me" --tokens 50 --top_p 0.9',
            sections=(),
            run=generate,
            details=_GENERATE_DETAILS,
        ),
        "summarize": Command(
            usage="summarize RUN [--json]",
            summary="Say what happened in a run: steps, losses, speed, restarts.",
            example="summarize runs/llama3-debug --json",
            sections=(),
            run=summarize,
        ),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return the exit code."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        return _refuse(error.problems)
    except UsageError as error:
        return _refuse([str(error)])
    except KeyboardInterrupt:
        print("interrupted; run the same command again", file=sys.stderr)
        if argv is None:
            os._exit(
                RESUMABLE
            )  # at once: threads in the middle of something would complain of the interpreter's end
        return RESUMABLE
    except BrokenPipeError:
        code = FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    _finish_output()
    if argv is None:  # the answer is out: a signal that comes while the interpreter winds up must not change it
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return code


def _finish_output() -> None:
    """Flush what was printed; if the reader has enough, as in `... --help | head`, forget the rest quietly."""
    stdout = sys.stdout
    if stdout is None:  # the process was started without any
        return
    try:
        stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # or Python would complain again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return OK
    if arguments[0] == "--version":
        print(f"jax-titan {version('jax-titan')}")
        return OK
    name, *rest = arguments
    if name not in COMMANDS:
        way_out = suggestion(name, COMMANDS) or f"; commands are {', '.join(COMMANDS)}"
        raise UsageError(f"{show(name)} is an unknown command{way_out}")
    # -h further back may be the value of a flag
    if "--help" in rest or "-h" in rest[:2]:
        _print_command_help(name, rest)
        return OK
    return COMMANDS[name].run(rest)


def _refuse(problems: Sequence[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return USAGE


def _source_and_flags(command: str, arguments: list[str]) -> tuple[str, list[str]]:
    if not arguments or arguments[0].startswith("-"):
        example = COMMANDS[command].example
        raise UsageError(f"{command}: name a preset or a TOML file first, for example: jax-titan {example}")
    return arguments[0], arguments[1:]


def _without(flag: str, arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments without a flag that takes no value, in either spelling, and whether it was there."""
    spellings = (flag, "--" + flag[2:].replace("-", "_"))
    rest = [argument for argument in arguments if argument not in spellings]
    return rest, len(rest) < len(arguments)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: jax-titan COMMAND ...",
            "",
            "Train language models with JAX.",
            "",
            *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
            "",
            _presets(),
            f"Example: jax-titan {COMMANDS['train'].example}",
            "`jax-titan COMMAND --help` tells more; `jax-titan --version` tells the version.",
        ]
    )


def _presets() -> str:
    return textwrap.fill(f"Presets: {', '.join(presets())}", 80)


def _print_command_help(name: str, arguments: list[str]) -> None:
    command = COMMANDS[name]
    example = f"Example: jax-titan {command.example}"
    if command.sections:
        known = _presets().replace("\n", "\n\n")  # tyro joins lines, but not paragraphs
        description = "\n\n".join(part for part in (command.summary, command.details, example, known) if part)
        print_help(f"jax-titan {command.usage}", description, arguments[0], command.sections)
    else:
        details = f"\n{command.details}\n" if command.details else ""
        print(f"usage: jax-titan {command.usage}\n\n{command.summary}\n{details}{example}")
