"""What a checkpoint costs: time for the training loop, memory of the process, bytes read.

    python benchmarks/checkpoint_cost.py [--megabytes 512]

A state of that size in arrays of 16 to 64 MB is saved from eight devices, one stage each, while it trains on, and
restored onto other layouts; every line is a process of its own. On CPU the memory of devices is memory of the
process, so a restore takes the state's size at least: shown is the highest memory beyond that, and beyond what the
process had before. Glibc is told to give back what is freed (MALLOC_MMAP_THRESHOLD_); where it keeps it, as by
default, some 10 % of the state come on top.
Claims: an asynchronous save blocks for at most 0.3 s a GB, and takes the state once more (the step taken meanwhile
cannot reuse its memory) and 384 MB; a restore takes 160 MB, and reads at most 3 times the state's bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEVICES = 8
MB = 2**20
MOST_BLOCKING_SECONDS_A_GB, MOST_SAVE_MB, MOST_RESTORE_MB, MOST_TIMES_READ = 0.3, 384, 160, 3.0
SAVES = ("asynchronous", "synchronous")
RESTORES = ("the same stages", "one device", "2 stages of 4 (fsdp)", "2 stages of 4 (tensor)", "8 devices (2 x 4)")


def state_shapes(megabytes: int) -> dict[str, tuple[int, int]]:
    """Units with one matrix each, of 16, 32 and 64 MB in turn."""
    shapes, used, rows = {}, 0, (1024, 2048, 4096)
    while used < megabytes:
        shape = (rows[len(shapes) % 3], 4096)
        shapes[f"layers.{len(shapes)}"] = shape
        used += shape[0] * 4096 * 4 // MB
    return shapes


def placements(layout: str, units: list[str]) -> dict[str, Any]:
    """The sharding of each unit's matrix."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    devices = jax.devices()
    if layout.startswith("2 stages"):
        spec = PartitionSpec("x") if "fsdp" in layout else PartitionSpec(None, "x")
        homes: list[Any] = [NamedSharding(Mesh(np.array(devices[i : i + 4]), "x"), spec) for i in (0, 4)]
    elif layout.startswith("8 devices"):
        homes = [NamedSharding(Mesh(np.array(devices).reshape(2, 4), ("x", "y")), PartitionSpec("x", "y"))]
    else:
        homes = [SingleDeviceSharding(d) for d in (devices[:1] if layout == "one device" else devices)]
    return {unit: homes[i * len(homes) // len(units)] for i, unit in enumerate(units)}


def measure_save(directory: Path, megabytes: int, asynchronous: bool) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    from jax_titan.trainer.checkpoint import Checkpoints

    shapes = state_shapes(megabytes)
    homes = placements("the same stages", list(shapes))
    params = {
        unit: {"w": jax.device_put(jax.random.normal(jax.random.key(i), shape), homes[unit])}
        for i, (unit, shape) in enumerate(shapes.items())
    }
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0.5 + 1, tree), donate_argnums=0)

    def train(params):
        return jax.block_until_ready({unit: step(tree) for unit, tree in params.items()})

    params = train(params)
    checkpoints = Checkpoints(directory, 1, asynchronous)
    checkpoints.save(1, {"x": {"w": jnp.ones(1)}}, {"x": {"w": jnp.ones(1)}}, {"warm": "up"})
    checkpoints.finished(wait=True)
    reset_peak()
    before = memory_mb("VmRSS")
    checkpoints.save(2, params, {"x": {"count": jnp.ones(1)}}, {"what": "benchmark"})
    params = train(params)
    (saved,) = checkpoints.finished(wait=True)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {
        "blocking_seconds_a_gb": saved.blocking_seconds / size * 1e9,
        "seconds_a_gb": saved.seconds / size * 1e9,
        "beyond_mb": memory_mb("VmHWM") - before,
        "state_mb": size / MB,
    }


def measure_restore(directory: Path, layout: str) -> dict[str, float]:
    import jax

    from jax_titan.trainer.checkpoint import Checkpoints

    checkpoints = Checkpoints(directory, 1)
    step = checkpoints.latest_step
    assert step is not None
    shapes = checkpoints.shapes(step)
    homes = placements(layout, list(shapes))
    wanted = {
        unit: {"w": jax.ShapeDtypeStruct(tree["w"].shape, tree["w"].dtype, sharding=homes[unit])}
        for unit, tree in shapes.items()
    }
    jax.block_until_ready([jax.device_put(1.0, device) for device in jax.devices()])
    reset_peak()
    before, read, start = memory_mb("VmRSS"), bytes_read(), time.monotonic()
    params = jax.block_until_ready(checkpoints.restore_params(step, wanted))
    seconds = time.monotonic() - start
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {
        "seconds_a_gb": seconds / size * 1e9,
        "beyond_mb": memory_mb("VmHWM") - before - size / MB,
        "times_read": (bytes_read() - read) / size,
    }


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory_mb(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def in_a_process_of_its_own(directory: Path, what: str, megabytes: int) -> dict[str, float]:
    environment = {"MALLOC_MMAP_THRESHOLD_": str(MB)} | os.environ
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    command = [
        sys.executable,
        __file__,
        "--one",
        what,
        "--directory",
        str(directory),
        "--megabytes",
        str(megabytes),
    ]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one in SAVES:
        found = measure_save(arguments.directory, arguments.megabytes, arguments.one == "asynchronous")
    elif arguments.one:
        found = measure_restore(arguments.directory, arguments.one)
    else:
        return report(arguments.megabytes)
    print(json.dumps(found))
    return 0


def report(megabytes: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        saves = {what: in_a_process_of_its_own(Path(name) / what, what, megabytes) for what in SAVES}
        source = Path(name) / SAVES[0]
        restores = {what: in_a_process_of_its_own(source, what, megabytes) for what in RESTORES}
    print(f"{'save':>24}  {'blocks':>10}  {'commits':>10}  {'memory beyond the state':>23}")
    for what, row in saves.items():
        blocks, commits = f"{row['blocking_seconds_a_gb']:.2f} s/GB", f"{row['seconds_a_gb']:.2f} s/GB"
        print(f"{what:>24}  {blocks:>10}  {commits:>10}  {row['beyond_mb']:>20.0f} MB")
    print(f"{'restore onto':>24}  {'takes':>10}  {'reads':>10}  {'memory beyond the state':>23}")
    for what, row in restores.items():
        takes, reads = f"{row['seconds_a_gb']:.2f} s/GB", f"{row['times_read']:.2f} x"
        print(f"{what:>24}  {takes:>10}  {reads:>10}  {row['beyond_mb']:>20.0f} MB")
    save = saves["asynchronous"]
    holds = (
        save["blocking_seconds_a_gb"] <= MOST_BLOCKING_SECONDS_A_GB
        and save["beyond_mb"] - save["state_mb"] <= MOST_SAVE_MB
        and max(row["beyond_mb"] for row in restores.values()) <= MOST_RESTORE_MB
        and max(row["times_read"] for row in restores.values()) <= MOST_TIMES_READ
    )
    print(f"the claims: {'hold' if holds else 'do not hold'}")
    print(json.dumps({"benchmark": "checkpoint_cost", "saves": saves, "restores": restores, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
