"""Getting a pipeline ready costs the same for 4 microbatches and for 64.

    python benchmarks/compile_cost.py [--rounds 3] [--stages 4]

The program of one microbatch is partitioned and compiled; the schedule only says how often it runs. Each round
builds both pipelines in a process of its own, in turn, and times lowering, partitioning, compiling.
Claim: the ratio of the medians is at most 1.15, and the fragments are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

MICROBATCHES = (4, 64)
MOST = 1.15


def measure(stages: int, microbatches: int) -> dict[str, float | None]:
    """Build one pipeline of the demo's model in this process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(stages)
    import jax

    from jax_titan.config import load
    from jax_titan.trainer.build import build_layout, build_model, build_optimizer

    shape = f"--train.microbatches {microbatches} --train.batch {3 * microbatches} --pipeline.stages {stages}"
    config = load("llama3-debug", shape.split())
    model = build_model(config, config.data.vocab_size)
    layout = build_layout(config, model, build_optimizer(config), jax.devices())
    report = layout.compile()
    return {
        "seconds": report.seconds,
        "fragments": report.fragments,
        "partition_seconds": report.partition_seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.stages, arguments.one)))
        return 0
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in MICROBATCHES}
    for round_index in range(arguments.rounds):
        for count in MICROBATCHES if round_index % 2 == 0 else MICROBATCHES[::-1]:
            command = [sys.executable, __file__, "--one", str(count), "--stages", str(arguments.stages)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[count].append(json.loads(output))
    medians = {count: statistics.median(r["seconds"] for r in rows) for count, rows in found.items()}
    fragments = {count: {r["fragments"] for r in rows} for count, rows in found.items()}
    few, many = MICROBATCHES
    ratio = medians[many] / medians[few]
    print(f"{'microbatches':>12}  {'ready after':>12}  {'partitioning':>12}  fragments")
    for count, rows in found.items():
        partitioning = statistics.median(r["partition_seconds"] for r in rows)
        print(f"{count:>12}  {medians[count]:>10.2f} s  {partitioning:>10.2f} s  {fragments[count].copy().pop()}")
    holds = ratio <= MOST and fragments[few] == fragments[many]
    print(f"ratio {ratio:.3f} (claim: at most {MOST}): {'holds' if holds else 'does not hold'}")
    print(json.dumps({"benchmark": "compile_cost", "ratio": ratio, "seconds": medians, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
