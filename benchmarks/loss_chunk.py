"""What `train.loss_chunk` saves and costs: temporary memory and CPU time of the loss and its gradients.

    python benchmarks/loss_chunk.py

Prints a table and, as its last line, JSON. Ratios to the form that holds all logits, one process, interleaved,
median of several rounds.
"""

import json
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp

from jax_titan import ops

TOKENS, WIDTH, VOCAB = 1024, 512, 32768
CHUNKS = (0, 64, 128, 256)
ROUNDS = 5


def loss(x, w, targets, weights, *, chunk):
    return ops.linear_cross_entropy("BTD,DV->BTV", x, w, targets, weights, chunk=chunk)[0]


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def measure(sequences: int) -> list[dict[str, float]]:
    """Bytes and seconds of each chunk, for batches of [sequences, TOKENS / sequences]."""
    shape = (sequences, TOKENS // sequences)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (*shape, WIDTH))
    w = jax.random.normal(keys[1], (WIDTH, VOCAB)) / WIDTH**0.5
    arguments = (x, w, jax.random.randint(keys[2], shape, 0, VOCAB), jnp.ones(shape))
    step = {
        chunk: jax.jit(jax.value_and_grad(partial(loss, chunk=chunk), argnums=(0, 1))).lower(*arguments).compile()
        for chunk in CHUNKS
    }
    seconds: dict[int, list[float]] = {chunk: [] for chunk in CHUNKS}
    for _ in range(ROUNDS + 1):
        for chunk, run in step.items():
            start = time.process_time()
            jax.block_until_ready(run(*arguments))
            seconds[chunk].append(time.process_time() - start)
    temporary = {chunk: temporary_bytes(run) for chunk, run in step.items()}
    median = {chunk: statistics.median(times[1:]) for chunk, times in seconds.items()}
    return [
        {
            "sequences": sequences,
            "chunk": chunk,
            "temporary_bytes": temporary[chunk],
            "temporary_ratio": temporary[chunk] / temporary[0],
            "cpu_seconds": median[chunk],
            "cpu_ratio": median[chunk] / median[0],
        }
        for chunk in CHUNKS
    ]


def main() -> None:
    rows = [row for sequences in (1, 8) for row in measure(sequences)]
    print(f"{TOKENS} tokens, width {WIDTH}, vocabulary {VOCAB}; ratios to the form with all logits")
    print("sequences  chunk  temporary MB  ratio  CPU s  ratio")
    for row in rows:
        print(
            f"{row['sequences']:9d}  {row['chunk'] or 'all':>5}  {row['temporary_bytes'] / 1e6:12.1f}  "
            f"{row['temporary_ratio']:5.2f}  {row['cpu_seconds']:5.2f}  {row['cpu_ratio']:5.2f}"
        )
    print(json.dumps({"benchmark": "loss_chunk", "rows": rows}))


if __name__ == "__main__":
    main()
