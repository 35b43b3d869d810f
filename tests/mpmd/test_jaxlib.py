"""The guard of the private module: it holds on this jaxlib, and a change is noticed with one clear error."""

import os
import subprocess
import sys
import types

import jaxlib
import pytest

from jax_titan.mpmd import _jaxlib


def test_the_canned_module_is_cut_into_two_fragments_and_a_transfer():
    module = _jaxlib.load_partitioner()
    assert _jaxlib.cut_canned_module(module) == ["mpmd.fragment_call", "mpmd.transfer", "mpmd.fragment_call"]


def test_loading_leaves_no_alias_behind():
    code = (
        "import sys, jax; from jax_titan.mpmd._jaxlib import load_partitioner; load_partitioner();"
        "assert not [m for m in sys.modules if m.startswith('jax.jaxlib')], sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_partitioner_is_silent():
    code = "import jax; from jax_titan.mpmd._jaxlib import load_partitioner; load_partitioner(); print('done')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "done\n"
    assert result.stderr == ""


@pytest.mark.parametrize("version", ["0.9.1", "0.11.1", "0.13.0", "1.0.0"])
def test_a_version_outside_the_range_is_refused(monkeypatch, version):
    monkeypatch.setattr(jaxlib, "__version__", version)
    with pytest.raises(_jaxlib.UnsupportedJaxlibError, match=rf"jaxlib {version} .*spmd"):
        _jaxlib.load_partitioner.__wrapped__()


def test_a_missing_name_is_named(monkeypatch):
    monkeypatch.setattr(
        _jaxlib, "_import", lambda _: types.SimpleNamespace(clone_mlir_module=1, PartitioningPhase=2)
    )
    with pytest.raises(_jaxlib.UnsupportedJaxlibError, match="lacks apply_mpmd_partitioning"):
        _jaxlib.load_partitioner.__wrapped__()


def _imitation(**changes):
    real = _jaxlib.load_partitioner()
    names = {name: getattr(real, name) for name in _jaxlib._NAMES}
    return types.SimpleNamespace(**(names | changes))


def test_a_lost_keyword_is_named(monkeypatch):
    def apply_mpmd_partitioning():
        """apply_mpmd_partitioning(module, func_name, named_meshes, assignment)"""

    changed = _imitation(apply_mpmd_partitioning=apply_mpmd_partitioning)
    monkeypatch.setattr(_jaxlib, "_import", lambda _: changed)
    with pytest.raises(_jaxlib.UnsupportedJaxlibError, match="no longer takes input_meshes"):
        _jaxlib.load_partitioner.__wrapped__()


def test_another_result_is_noticed(monkeypatch):
    monkeypatch.setattr(_jaxlib, "cut_canned_module", lambda _: ["mpmd.fragment_call"])
    with pytest.raises(_jaxlib.UnsupportedJaxlibError, match="cuts a canned module into"):
        _jaxlib.load_partitioner.__wrapped__()


def test_a_failing_partitioner_is_noticed(monkeypatch):
    def broken(_):
        raise RuntimeError("no such pass")

    monkeypatch.setattr(_jaxlib, "cut_canned_module", broken)
    with pytest.raises(_jaxlib.UnsupportedJaxlibError, match="no such pass"):
        _jaxlib.load_partitioner.__wrapped__()


def test_silenced_gives_the_descriptors_back_after_an_error(capfd):
    def noisy():
        with _jaxlib.silenced():
            os.write(1, b"hidden\n")
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        noisy()
    os.write(1, b"seen\n")
    assert capfd.readouterr().out == "seen\n"
