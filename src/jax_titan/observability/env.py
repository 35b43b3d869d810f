"""Facts about where a run runs: versions, devices, and the most memory it has used. No host name, no user, no
environment variable: a record may be shown to anyone.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def environment(devices: Sequence[Any] | None = None) -> dict[str, Any]:
    """The fields of `records.AttemptStart` that describe the environment.

    Args:
        devices: the JAX devices of the run; `jax.devices()` by default.
    """
    if devices is None:
        import jax

        devices = jax.devices()
    return {
        "devices": len(devices),
        "platform": _distinct([device.platform for device in devices]),
        "device_kind": _distinct([device.device_kind for device in devices]),
        "jax_version": _version("jax"),
        "jaxlib_version": _version("jaxlib"),
        "python_version": platform.python_version(),
        "jax_titan_version": _version("jax-titan"),
    }


def host_peak_bytes() -> int | None:
    """The most memory this process has held resident so far, or None where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # the kernel's kB is 1024 bytes
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak if sys.platform == "darwin" else peak * 1024) or None


def device_peak_bytes(devices: Sequence[Any]) -> list[int | None] | None:
    """The most memory used so far on each device, None for one that does not tell; None if none does."""
    peaks = [_device_peak_bytes(device) for device in devices]
    return None if all(peak is None for peak in peaks) else peaks


def _device_peak_bytes(device: Any) -> int | None:
    try:
        stats = device.memory_stats()
    except (RuntimeError, ValueError):  # another process's device
        return None
    return (stats or {}).get("peak_bytes_in_use")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout on PYTHONPATH
        return None


def _distinct(names: Sequence[str]) -> str:
    return ", ".join(sorted(set(names)))
