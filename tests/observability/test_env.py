"""What a record says about its environment: enough to repeat the run, nothing about who ran it."""

from __future__ import annotations

import dataclasses
import getpass
import platform
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jax_titan.observability import env
from jax_titan.observability.records import AttemptStart


def fake_device(kind: str = "H200", stats: Any = None) -> SimpleNamespace:
    def memory_stats() -> Any:
        if isinstance(stats, Exception):
            raise stats
        return stats

    return SimpleNamespace(platform="gpu", device_kind=kind, memory_stats=memory_stats)


def test_the_environment_fills_fields_of_attempt_start():
    facts = env.environment([fake_device("H200"), fake_device("A100"), fake_device("H200")])
    assert set(facts) <= {field.name for field in dataclasses.fields(AttemptStart)}
    assert (facts["devices"], facts["platform"], facts["device_kind"]) == (3, "gpu", "A100, H200")
    assert facts["python_version"] == platform.python_version()


def test_without_devices_the_environment_describes_those_of_jax():
    jax = pytest.importorskip("jax")
    facts = env.environment()
    assert facts["devices"] == jax.device_count()
    assert facts["platform"] == jax.devices()[0].platform
    assert facts["jax_version"] == jax.__version__


def test_the_environment_names_neither_host_nor_user():
    texts = [str(value).lower() for value in env.environment([fake_device()]).values()]
    assert socket.gethostname().lower() not in texts
    assert getpass.getuser().lower() not in texts


def test_the_host_peak_covers_memory_that_was_touched_and_freed():
    # In a process of its own, whose peak is not yet high.
    code = """
from jax_titan.observability.env import host_peak_bytes
before = host_peak_bytes()
block = bytearray(b"x") * 2**26
del block
print(before, host_peak_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    if before == "None":
        pytest.skip("this system does not tell")
    assert 2**26 * 0.9 <= int(after) - int(before) <= 2**26 * 2.1


def test_device_peaks_are_null_where_a_device_does_not_tell():
    tells = fake_device(stats={"peak_bytes_in_use": 5})
    silent = [fake_device(), fake_device(stats={}), fake_device(stats=RuntimeError("not addressable"))]
    assert env.device_peak_bytes([tells, *silent]) == [5, None, None, None]
    assert env.device_peak_bytes(silent) is None
    assert env.device_peak_bytes([]) is None
