"""Settings that must be made before JAX is imported: eight virtual CPU devices, and one compile cache a session.

The cache lets layouts that differ only in their schedule, and processes that the tests start, reuse programs.
It is made anew for each session, so nothing of an earlier run is ever tested.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

DEVICES = 8

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
_cache = tempfile.mkdtemp(prefix="jax-titan-tests-")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(_cache, "xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
# Corpora that the tests prepare; a user's own cache is left alone.
os.environ["XDG_CACHE_HOME"] = os.path.join(_cache, "home")

# JAX keeps every program that was ever compiled until its caches are cleared, and each takes some of the memory
# regions that a process may have (65,530 by default on Linux); beyond them LLVM aborts the process.
MOST_REGIONS = 20_000


def _memory_regions() -> int:
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # no such file on other systems
        return 0


@pytest.fixture(autouse=True)
def _room_for_programs():
    """Let go of the programs of earlier tests before they fill the process."""
    yield
    if "jax" in sys.modules and _memory_regions() > MOST_REGIONS:
        sys.modules["jax"].clear_caches()
        gc.collect()
