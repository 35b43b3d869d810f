"""The fields of a run: a section is a frozen dataclass, a field is one line of it.

That line is everything there is to say about the field: type, default, help, limits.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from jax_titan.parallel.mesh import AXES, Degrees

# The values of a layer that `train.remat` may name: models.llama.KEPT_NAMES, which this room cannot import; a test
# compares them.
KEPT_NAMES = ("query", "key", "value", "attention", "attention_out", "ffn_gate", "ffn_up", "ffn_out")

VIRTUAL_DEVICES = 4096
"""Most virtual devices of platform cpu: making them takes 13 s and 1.4 GB."""


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
    rope_factor: float = option(
        1.0, "how far Llama 3.1's rule stretches the low rotary frequencies (1: not at all)", at_least=1
    )
    rope_low_freq_factor: float = option(
        1.0, "that rule: turns in the original context below which all is", above=0
    )
    rope_high_freq_factor: float = option(4.0, "that rule: turns above which nothing is stretched", above=0)
    rope_original_length: int = option(8192, "that rule: the original context, in tokens", at_least=1)
    norm_eps: float = option(1e-5, "added to the mean square in RMSNorm", above=0)
    init_std: float = option(0.02, "standard deviation of the initial weights", above=0)
    tied: bool = option(False, "use the embedding as the output head too")
    dtype: Literal["bfloat16", "float32", "float64"] = option(
        "float32", "number format of the computation (float64 is for tests); weights are stored in float32"
    )
    init_from: str = option("", "run directory whose latest checkpoint gives the first weights (empty: random)")


@dataclass(frozen=True)
class Data:
    """The text, and how it becomes tokens."""

    path: str = option(
        "", "text, .jsonl or .parquet file, or directory of them (empty: the corpus that comes with jax-titan)"
    )
    mixture: str = option(
        "", "corpora and how often rows come from each, such as books.jsonl=3,code/=1 (then data.path is empty)"
    )
    tokenizer: Literal["bytes", "bpe", "llama3", "huggingface"] = option(
        "bpe",
        "bytes; bpe: trained on the corpus unless a file is given; llama3: a tokenizer.model; huggingface: a "
        "tokenizer.json",
    )
    tokenizer_file: str = option("", "file of the tokenizer (llama3: empty takes that of the extra llama-models)")
    vocab_size: int = option(2048, "tokens in the vocabulary of a trained BPE", at_least=1, at_most=2**24)
    text_field: str = option("text", "name of the field that holds the text, in JSON lines and Parquet")
    prompt_field: str = option(
        "", "name of a field whose text comes before and is not scored, for fine-tuning (empty: none)"
    )
    packing: Literal["split", "best-fit"] = option(
        "split", "split: documents end to end, cut anywhere; best-fit: whole where they fit, with some padding"
    )
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
    remat: str = option(
        "none",
        "what a layer computes again in the backward pass to save memory: none, full, dots (all but products with "
        "weights), or all but the named values, such as query,key,value",
    )
    loss_chunk: int = option(
        0, "tokens of a microbatch whose logits exist at once in the loss (0: all)", at_least=0, at_most=2**24
    )
    loss_accumulator: Literal["float32", "bfloat16"] = option(
        "float32", "with loss_chunk, number format in which the gradient of the output matrix is summed"
    )
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
    state_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "number format of the two means (bfloat16 halves them; float64 runs keep float64)"
    )
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
    asynchronous: bool = option(True, "write a checkpoint while training goes on")


@dataclass(frozen=True)
class Parallel:
    """How devices share the work."""

    layout: Literal["mpmd", "spmd"] = option(
        "mpmd", "mpmd: a pipeline of programs; spmd: one program on all devices"
    )
    data: int = option(1, "parts of the batch, each on devices of its own", at_least=1, at_most=2**20)
    fsdp: int = option(
        1,
        "parts of every parameter, gathered for use; each has its part of the batch too",
        at_least=1,
        at_most=2**20,
    )
    tensor: int = option(
        1, "parts of every matrix product: of heads, ffn_dim, vocabulary", at_least=1, at_most=2**20
    )
    context: int = option(1, "parts of every sequence", at_least=1, supported=1)
    scan_layers: bool = option(
        False, "spmd: one program for all layers, so that compile time does not grow with their number"
    )


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of layout mpmd; spmd has none and ignores it."""

    stages: int = option(4, "consecutive parts of the model, each on devices of its own", at_least=1)
    data: str = option("", "parallel.data of each stage, such as 1,2,1 (empty: the same for all)")
    fsdp: str = option("", "parallel.fsdp of each stage")
    tensor: str = option("", "parallel.tensor of each stage")
    schedule: Literal["gpipe", "1f1b"] = option("1f1b", "order of forward and backward passes in a stage")
    chunks: int = option(1, "virtual stages a device holds", at_least=1, supported=1)


@dataclass(frozen=True)
class Platform:
    """The hardware."""

    name: Literal["", "cpu", "gpu", "cuda", "rocm", "tpu"] = option("", "JAX platform (empty: the one JAX picks)")
    devices: int = option(
        0, "virtual devices of platform cpu (0: as many as the layout needs)", at_least=0, at_most=VIRTUAL_DEVICES
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
    def degrees(self) -> tuple[Degrees, ...]:
        """How each mesh is split: one for each stage of layout mpmd, one alone for spmd.

        Raises:
            ValueError: a list of the pipeline that is no list of numbers, or not one number a stage.
        """
        own = self.parallel
        if own.layout == "spmd":
            return (Degrees(own.data, own.fsdp, own.tensor),)
        stages = self.pipeline.stages
        lists = [per_stage(getattr(self.pipeline, axis), getattr(own, axis), stages) for axis in AXES]
        return tuple(Degrees(*sizes) for sizes in zip(*lists, strict=True))

    @property
    def devices_needed(self) -> int:
        """Devices the layout occupies."""
        return sum(degrees.devices for degrees in self.degrees)


def per_stage(text: str, otherwise: int, stages: int) -> list[int]:
    """A number for each stage, from text such as "1,2,1"; `otherwise` for all of them when it is empty.

    Raises:
        ValueError: what is wrong with the text.
    """
    if not text.strip():
        return [otherwise] * stages
    parts = [part.strip() for part in text.split(",")]
    if bad := [part for part in parts if not (part.isascii() and part.isdigit() and 1 <= int(part) <= 2**20)]:
        raise ValueError(f"{bad[0]!r} is not a number of parts; write one for each stage, such as 1,2,1")
    if len(parts) != stages:
        raise ValueError(f"{len(parts)} numbers for {stages} pipeline.stages; write one for each stage")
    return [int(part) for part in parts]
