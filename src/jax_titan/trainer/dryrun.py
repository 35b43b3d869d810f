"""`train --dry-run`: what a run would be and do, without a device, a corpus or a file being touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_titan.config import Config
from jax_titan.config.checks import BYTE_VOCABULARY
from jax_titan.data.tokenizer import open_tokenizer
from jax_titan.trainer.build import build_model, build_optimizer
from jax_titan.trainer.placement import Placement
from jax_titan.trainer.rundir import check_run_dir


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What `jax-titan train` would do.

    Attributes:
        config: of the run.
        placement: what would live where.
        resume_step: of the last checkpoint; 0 for a new run.
    """

    config: Config
    placement: Placement
    resume_step: int

    @classmethod
    def of(cls, config: Config) -> DryRun:
        """Work it out.

        Raises:
            ConfigError, DataError: what a real run would refuse before it touches a device.
        """
        check_run_dir(config)
        model = build_model(config, _vocab_size(config))
        return cls(config, Placement.of(config, model, build_optimizer(config)), _last_step(config))

    def lines(self) -> Iterator[str]:
        """For a person."""
        yield from self.placement.lines()
        c = self.config
        d, t = c.data, c.train
        corpus = d.mixture or d.path or "the bundled corpus"
        size = (
            "" if c.model.vocab_size or d.tokenizer != "bpe" or d.tokenizer_file else f" of {d.vocab_size} at most"
        )
        yield f"data: {corpus}, tokenizer {d.tokenizer}{size}, packing {d.packing}, stores in {c.cache_dir}"
        tokens = t.batch * t.sequence_length
        last = min(t.stop_after or t.steps, t.steps)
        if self.resume_step >= last:
            yield f"would do nothing: {c.run.dir} is complete at step {self.resume_step}"
        else:
            start = f"go on with {c.run.dir} after step {self.resume_step}" if self.resume_step else _start(c)
            yield f"would {start}: steps {self.resume_step + 1} to {last} of {t.steps}, {tokens:,} tokens each"
        yield "dry run: nothing was allocated or written"

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        t = self.config.train
        return {
            **self.placement.to_json(),
            "run_dir": self.config.run.dir,
            "resume_step": self.resume_step,
            "steps": t.steps,
            "tokens_per_step": t.batch * t.sequence_length,
        }


def _start(config: Config) -> str:
    weights = f" from the weights of {config.model.init_from}" if config.model.init_from else ""
    return f"start {config.run.dir}{weights}"


def _vocab_size(config: Config) -> int:
    d = config.data
    if config.model.vocab_size:
        return config.model.vocab_size
    if d.tokenizer == "bytes":
        return BYTE_VOCABULARY
    if d.tokenizer == "bpe" and not d.tokenizer_file:
        return d.vocab_size
    return open_tokenizer(d.tokenizer, d.tokenizer_file).vocab_size


def _last_step(config: Config) -> int:
    """The newest committed checkpoint: those being written have longer names."""
    directory = config.run_dir / "checkpoints"
    if not directory.is_dir():
        return 0
    return max((int(path.name) for path in directory.iterdir() if path.name.isdigit()), default=0)
