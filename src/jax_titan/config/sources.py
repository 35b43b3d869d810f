"""The sources of a configuration: presets, files, and the TOML in them, read into a draft."""

import os
import re
import tomllib
from importlib import resources
from pathlib import Path

from jax_titan.config.draft import Draft
from jax_titan.config.fields import FIELDS, SECTIONS, unknown_field
from jax_titan.config.problems import show, show_name, suggestion


def presets() -> dict[str, str]:
    """TOML text of every preset by its name."""
    files = (resources.files("jax_titan") / "presets").iterdir()
    texts = {
        item.name.removesuffix(".toml"): item.read_text("utf-8") for item in files if item.name.endswith(".toml")
    }
    return dict(sorted(texts.items()))


def read_source(draft: Draft, source: str) -> str:
    """Read a preset or file into the draft; returns the name of runs made from it."""
    if source not in presets() and (source.endswith(".toml") or "/" in source or os.path.exists(source)):
        text = _file_text(draft, source)
        if text is not None:
            read_toml(draft, text, show_name(source))
        return Path(source).stem
    read_preset(draft, source, "")
    return source


def _file_text(draft: Draft, path: str) -> str | None:
    shown = show_name(path)
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


def read_preset(draft: Draft, name: str, where: str) -> None:
    """Read a preset into the draft, or note that there is none of this name; `where` opens that problem."""
    known = presets()
    if name in known:
        read_toml(draft, known[name], f"preset {name}")
    else:
        way_out = f"{suggestion(name, known)} (known: {', '.join(known)}, or a FILE.toml)"
        draft.problems.append(f"{where}preset: {show(name)} is unknown{way_out}")


def read_toml(draft: Draft, text: str, where: str) -> None:
    """Read a TOML text into the draft, over the preset that it may name; `where` names it in problems."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        draft.problems.append(_syntax_problem(error, text, where))
        return
    where = f"{where}: "
    preset = document.pop("preset", None)
    if isinstance(preset, str):
        read_preset(draft, preset, where)
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


def _read_key(draft: Draft, name: str, value: object, where: str) -> None:
    if name in FIELDS:
        draft.set(name, lambda item: item.from_toml(value), where)
    else:
        draft.problems.append(where + unknown_field(name))


def _unknown_section(section: str, content: object) -> str:
    if not isinstance(content, dict):
        return unknown_field(section)
    way_out = suggestion(section, SECTIONS) or f"; sections are {', '.join(SECTIONS)}"
    return f"{show_name(section)}: unknown section{way_out}"


def _syntax_problem(error: Exception, text: str, where: str) -> str:
    """`file:line: what`; tomllib tells the line only inside its message, and not at all for the last one."""
    message = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "a value is too long or too deep"
    found = re.search(r" \(at line (\d+), column \d+\)$", message)
    line = found[1] if found else text.count("\n") + 1
    return f"{where}:{line}: {message.removesuffix(found[0] if found else ' (at end of document)')}"
