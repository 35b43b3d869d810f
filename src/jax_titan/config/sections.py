"""The fields of a run: a section is a frozen dataclass, a field is one line of it.

That line is everything there is to say about the field: type, default, help, limits.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast


@dataclass(frozen=True)
class Limits:
    """What a value of a field may be, beyond its type."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    supported: int | None = None  # larger values have a meaning, but nothing implements them yet


def option[T](default: T, help: str, **limits: float) -> T:
    """One field of a section: its default, its help (with the unit), and the names of `Limits`."""
    return cast("T", field(default=default, metadata={"help": help, "limits": Limits(**limits)}))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Run:
    """Where the run lives and what makes it random."""

    dir: str = option("", "run directory (empty: runs/NAME, NAME being the preset or the file)")
    seed: int = option(0, "seed of the parameters and of the order of the data", at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True)
class Model:
    """The model, a decoder of the Llama family."""

    layers: int = option(4, "decoder layers", at_least=1, at_most=10_000)
    dim: int = option(256, "width of the residual stream", at_least=1, at_most=2**20)
    heads: int = option(4, "query heads", at_least=1, at_most=2**16)
    kv_heads: int = option(2, "key and value heads, each shared by heads / kv_heads query heads", at_least=1)
    head_dim: int = option(0, "width of a head (0: dim / heads)", at_least=0, at_most=2**16)
    ffn_dim: int = option(688, "width inside the feed-forward block", at_least=1, at_most=2**24)
    vocab_size: int = option(
        0, "tokens in the vocabulary (0: as many as the tokenizer has)", at_least=0, at_most=2**31
    )
    rope_theta: float = option(500000.0, "base of the rotary position frequencies", above=0)
    norm_eps: float = option(1e-5, "added to the mean square in RMSNorm", above=0)
    init_std: float = option(0.02, "standard deviation of the initial weights", above=0)
    tied: bool = option(False, "use the embedding as the output head too")
    dtype: Literal["bfloat16", "float32", "float64"] = option(
        "float32", "number format of the computation (float64 is for tests)"
    )


@dataclass(frozen=True)
class Data:
    """The text, and how it becomes tokens."""

    path: str = option(
        "", "text or .jsonl file, or directory of them (empty: the corpus that comes with jax-titan)"
    )
    tokenizer: Literal["bytes", "bpe"] = option("bpe", "bytes, or a BPE trained on the corpus")
    vocab_size: int = option(2048, "tokens in the vocabulary of that BPE", at_least=1, at_most=2**24)
    text_field: str = option("text", "name of the field that holds the text in JSON lines")
    validation_fraction: float = option(
        0.05, "part of the text kept for evaluation, in whole documents (0: none)", at_least=0, below=1
    )
    cache: str = option("", "directory of token stores (empty: jax-titan/data in $XDG_CACHE_HOME or ~/.cache)")


@dataclass(frozen=True)
class Train:
    """The length of the run and the size of a step."""

    steps: int = option(300, "steps of the whole run; the learning-rate schedule spans them", at_least=1)
    batch: int = option(24, "sequences a step, over all microbatches", at_least=1, at_most=2**24)
    microbatches: int = option(8, "equal parts in which a step's batch passes through the model", at_least=1)
    sequence_length: int = option(128, "tokens a sequence", at_least=1, at_most=2**24)
    stop_after: int = option(
        0,
        "end this attempt after that step with a checkpoint, as if the job's time were up (0: never)",
        at_least=0,
    )


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its learning rate."""

    learning_rate: float = option(3e-3, "learning rate after the warm-up", above=0)
    schedule: Literal["cosine", "constant"] = option("cosine", "course of the learning rate after the warm-up")
    warmup_steps: int = option(20, "steps over which the learning rate rises from 0", at_least=0)
    final_fraction: float = option(
        0.1, "learning rate at the end of the cosine, as a part of learning_rate", at_least=0, at_most=1
    )
    b1: float = option(0.9, "decay of the mean of gradients", at_least=0, below=1)
    b2: float = option(0.95, "decay of the mean of squared gradients", at_least=0, below=1)
    eps: float = option(1e-8, "added to the root of the mean square", above=0)
    weight_decay: float = option(0.1, "decoupled weight decay, times the learning rate", at_least=0)
    clip_norm: float = option(1.0, "largest global gradient norm, scaled down beyond (0: no limit)", at_least=0)


@dataclass(frozen=True)
class Eval:
    """Loss on the validation split."""

    every: int = option(50, "steps between evaluations (0: only at the end)", at_least=0)
    batches: int = option(4, "batches an evaluation (0: all of the validation split)", at_least=0)


@dataclass(frozen=True)
class Checkpoint:
    """What is saved to continue from."""

    every: int = option(100, "steps between checkpoints (0: only when the run stops)", at_least=0)
    keep: int = option(3, "latest checkpoints that stay on disk", at_least=1)


@dataclass(frozen=True)
class Parallel:
    """How devices share the work."""

    layout: Literal["mpmd", "spmd"] = option(
        "mpmd", "mpmd: a pipeline of programs; spmd: one program on all devices"
    )
    data: int = option(1, "parts of the batch, each on devices of its own", at_least=1)
    fsdp: int = option(1, "parts of every parameter, gathered for use", at_least=1, supported=1)
    tensor: int = option(1, "parts of every matrix product", at_least=1, supported=1)
    context: int = option(1, "parts of every sequence", at_least=1, supported=1)


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of layout mpmd; spmd has none and ignores it."""

    stages: int = option(4, "consecutive parts of the model, each on devices of its own", at_least=1)
    schedule: Literal["gpipe", "1f1b"] = option("1f1b", "order of forward and backward passes in a stage")
    chunks: int = option(1, "virtual stages a device holds", at_least=1, supported=1)


@dataclass(frozen=True)
class Platform:
    """The hardware."""

    name: Literal["", "cpu", "gpu", "cuda", "rocm", "tpu"] = option("", "JAX platform (empty: the one JAX picks)")
    devices: int = option(
        0, "virtual devices of platform cpu (0: as many as the layout needs)", at_least=0, at_most=4096
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    platform: Platform = Platform()

    @property
    def run_dir(self) -> Path:
        """Directory of this run's config.toml, events.jsonl and checkpoints."""
        return Path(self.run.dir)

    @property
    def cache_dir(self) -> Path:
        """Directory of the token stores, by the XDG convention unless `data.cache` names one."""
        if self.data.cache:
            return Path(self.data.cache)
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(home) / "jax-titan" / "data"

    @property
    def units(self) -> int:
        """Units of the model that a pipeline may cut between: embed, the layers, head."""
        return self.model.layers + 2

    @property
    def devices_needed(self) -> int:
        """Devices the layout occupies."""
        inside = self.parallel.data * self.parallel.fsdp * self.parallel.tensor * self.parallel.context
        return inside * self.pipeline.stages if self.parallel.layout == "mpmd" else inside
