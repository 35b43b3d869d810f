"""Settings that must be made before JAX is imported: eight virtual CPU devices, and one compile cache a session.

The cache lets layouts that differ only in their schedule, and processes that the tests start, reuse programs.
It is made anew for each session, so nothing of an earlier run is ever tested.
"""

import atexit
import os
import shutil
import tempfile

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
