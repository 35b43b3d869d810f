"""The run directory: one run, one process at a time, and files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jax_titan.config import Config, ConfigError, fixed_differences, from_toml, to_toml


def check_run_dir(config: Config) -> None:
    """A directory holds one run: the same command goes on with it, another configuration is refused."""
    directory, saved = config.run_dir, config.run_dir / "config.toml"
    try:
        text = saved.read_text(encoding="utf-8") if saved.exists() else None
        found = [path.name for path in directory.iterdir()] if directory.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(directory, error) from error
    if text is not None:
        differences = fixed_differences(from_toml(text, str(saved)), config)
        if differences:
            raise ConfigError(
                [
                    *differences,
                    f"run.dir: {config.run.dir} holds a run of another configuration; use another directory, or "
                    "leave these fields as they are in the run",
                ]
            )
    elif any(not name.startswith(".config.toml.") and name != ".lock" for name in found):
        raise ConfigError([f"run.dir: {config.run.dir} exists and holds no run; use an empty or a new directory"])


def _unusable(directory: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    where = getattr(error, "filename", None) or directory / "config.toml"
    return ConfigError([f"run.dir: {where}: {reason}; use another directory"])


@contextmanager
def claim_run_dir(config: Config) -> Iterator[Path]:
    """Make the run directory and hold it for this process.

    Raises:
        ConfigError: it cannot be made, or another process holds it.
    """
    directory = config.run_dir
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise _unusable(directory, error) from error
    with lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it however the process ends
        except BlockingIOError as error:
            raise ConfigError(
                [f"run.dir: {directory} is in use by another process; wait for it, or use another directory"]
            ) from error
        except (ImportError, OSError):  # a system or a file system without such locks
            pass
        yield directory


def record_config(config: Config) -> None:
    """Write the resolved configuration into its run directory."""
    _write_atomically(config.run_dir / "config.toml", to_toml(config))


def _write_atomically(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)  # a temporary file is its owner's alone
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
