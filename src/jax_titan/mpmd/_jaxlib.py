"""The only file that touches a private module: `jaxlib._sdy_mpmd`, Shardy's MPMD partitioner.

Nothing public offers it yet; a public partitioner in JAX would replace this file. `load_partitioner` checks what
it relies on (version, names, keyword arguments, and the result of cutting a small canned module) before it hands
the module out, and fails with one `UnsupportedJaxlibError` otherwise: a new jaxlib must never fail obscurely.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

TESTED = ("0.11.2", "0.12.1")
SUPPORTED = ((0, 11, 2), (0, 13))  # inclusive, exclusive; moved together with the tests and pyproject.toml

_NAMES = ("apply_mpmd_partitioning", "clone_mlir_module", "PartitioningPhase")
_KEYWORDS = (
    "module",
    "func_name",
    "named_meshes",
    "assignment",
    "input_meshes",
    "output_meshes",
    "donate_argnums",
    "partitioning_options",
    "fragment_merge_rules",
    "fragment_schedule_rules",
    "phases",
)
_ALIASES = ("jax.jaxlib", "jax.jaxlib._jax", "jax.jaxlib.mlir", "jax.jaxlib.mlir.ir")
# Two named parts on two meshes, and what must come out: two fragments and the transfer between them.
_CANNED = """
module @canned {
  func.func public @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> {
    %0 = mpmd.named_computation<"first"> (%a) (%x: tensor<4xf32>) {
      %r = stablehlo.sine %x : tensor<4xf32>
      mpmd.return %r : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    %1 = mpmd.named_computation<"second"> (%0, %b) (%x: tensor<4xf32>, %y: tensor<4xf32>) {
      %r = stablehlo.add %x, %y : tensor<4xf32>
      mpmd.return %r : tensor<4xf32>
    } : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    return %1 : tensor<4xf32>
  }
}
"""
_silence = threading.Lock()


class UnsupportedJaxlibError(RuntimeError):
    """The installed jaxlib has no partitioner that this version of jax-titan knows how to use."""


@functools.cache
def load_partitioner() -> ModuleType:
    """The checked partitioner module.

    Raises:
        UnsupportedJaxlibError: naming the installed and the tested versions, and what did not hold.
    """
    import jaxlib

    installed: str = jaxlib.__version__  # pyright: ignore[reportPrivateImportUsage]
    numbers = tuple(int(n) for n in re.findall(r"\d+", installed)[:3])
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        raise _unsupported("its version is outside the supported range")
    module = _import(jaxlib)
    if missing := [name for name in _NAMES if not hasattr(module, name)]:
        raise _unsupported(f"its partitioner lacks {', '.join(missing)}")
    signature = module.apply_mpmd_partitioning.__doc__ or ""
    if absent := [word for word in _KEYWORDS if not re.search(rf"\b{word}\b", signature)]:
        raise _unsupported(f"its partitioner no longer takes {', '.join(absent)}")
    try:
        operations = cut_canned_module(module)
    except Exception as error:
        raise _unsupported(f"its partitioner fails on a canned module ({error})") from error
    if operations != ["mpmd.fragment_call", "mpmd.transfer", "mpmd.fragment_call"]:
        raise _unsupported(f"its partitioner cuts a canned module into {operations}")
    return module


def cut_canned_module(module: ModuleType) -> list[str]:
    """Partition a two-stage module; returns the names of the operations of the result, without its return."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import mpmd
    from jax.interpreters import mlir

    context = mlir.make_ir_context()
    mpmd.register_dialect(context)
    with context, ir.Location.unknown(context):
        canned = ir.Module.parse(_CANNED, context)
        with silenced():
            result = module.apply_mpmd_partitioning(
                canned,
                func_name="main",
                named_meshes=[("m0", [("x", 1)]), ("m1", [("x", 1)])],
                assignment={"first": ("m0", 0), "second": ("m1", 1)},
                input_meshes=["m0", "m1"],
                output_meshes=["m1"],
                donate_argnums=[],
                partitioning_options={"mpmd_pipeline_schedule": "none"},
                fragment_merge_rules=[],
                fragment_schedule_rules=[],
                phases=module.PartitioningPhase.ALL,
            )
        main = next(
            op for op in result.mpmd_module.body.operations if op.operation.name == "func.func"
        )  # the entry function comes first
        return [op.operation.name for op in main.regions[0].blocks[0].operations][:-1]


def _import(jaxlib: ModuleType) -> ModuleType:
    """Import the module, which asks for its siblings under a package name that a wheel does not have."""
    added = []
    try:
        importlib.import_module("jaxlib.xla_client")
        for alias in _ALIASES:
            if alias not in sys.modules:
                sys.modules[alias] = importlib.import_module(alias.removeprefix("jax."))
                added.append(alias)
        return importlib.import_module("jaxlib._sdy_mpmd")
    except ImportError as error:
        raise _unsupported(f"its partitioner does not import ({error})") from error
    finally:
        for alias in added:
            sys.modules.pop(alias, None)


def _unsupported(reason: str) -> UnsupportedJaxlibError:
    import jaxlib

    installed: str = jaxlib.__version__  # pyright: ignore[reportPrivateImportUsage]
    return UnsupportedJaxlibError(
        f"jaxlib {installed} cannot cut a pipeline: {reason}; jax-titan was tested with jaxlib "
        f"{' and '.join(TESTED)}; install one of these, or use parallel.layout spmd"
    )


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Send this process's file descriptors 1 and 2 to nowhere.

    The partitioner logs at INFO level straight to descriptor 1, and no logging flag reaches it.
    """
    with _silence:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        saved = {}
        try:
            for descriptor in (1, 2):
                with contextlib.suppress(OSError):  # a daemon may have closed it
                    saved[descriptor] = os.dup(descriptor)
                    os.dup2(nowhere, descriptor)
            yield
        finally:
            for descriptor, copy in saved.items():
                os.dup2(copy, descriptor)
                os.close(copy)
            os.close(nowhere)
