"""Text from a trained model: `Generator` reads a run's checkpoint, of whatever layout, and continues prompts.

A prompt's tokens enter the cache at once, then one token a step is drawn for all prompts together. What is drawn
for one depends on the seed and on its own text, never on its neighbours or its place among them.

Shape suffixes: B prompts, T tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_titan.config import ConfigError, from_toml
from jax_titan.data.tokenizer import Tokenizer, load
from jax_titan.models.decode import decode, empty_cache
from jax_titan.models.unit import Model
from jax_titan.parallel.mesh import Degrees, make_mesh
from jax_titan.trainer.build import build_model
from jax_titan.trainer.checkpoint import Checkpoints
from jax_titan.trainer.corpus import TOKENIZER
from jax_titan.trainer.sampling import Sampling
from jax_titan.trainer.state import abstract_params

_STEP = 32  # lengths are rounded up to a multiple of this, so that few programs serve all prompts


@dataclasses.dataclass(frozen=True)
class Generator:
    """A trained model, ready to continue text.

    Attributes:
        model: the chain of units.
        params: by unit name.
        tokenizer: of the run.
        step: of the checkpoint.
    """

    model: Model
    params: Any
    tokenizer: Tokenizer
    step: int

    @classmethod
    def of_run(cls, directory: Path, step: int | None = None) -> Generator:
        """Read the parameters of a run onto the first device.

        Args:
            directory: of the run.
            step: of the checkpoint; the newest by default.

        Raises:
            ConfigError: it is no run, or has no such checkpoint.
            CheckpointError: the checkpoint cannot be read.
        """
        try:
            config = from_toml((directory / "config.toml").read_text(encoding="utf-8"), "config.toml")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"{directory}: it holds no run; name the directory of a run"]) from error
        if config.model.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        if not (directory / TOKENIZER).exists():
            raise ConfigError([f"{directory}: it has no {TOKENIZER}; resume the run once to have it written"])
        tokenizer = load(directory / TOKENIZER)
        checkpoints = Checkpoints(directory / "checkpoints", keep=None)
        step = checkpoints.latest_step if step is None else step
        if step is None:
            raise ConfigError([f"{directory}: it has no checkpoint yet; train it first"])
        model = build_model(config, tokenizer.vocab_size)
        mesh = make_mesh(jax.devices()[:1], Degrees())
        params = checkpoints.restore_params(step, {unit.name: abstract_params(unit, mesh) for unit in model.units})
        return cls(model, params, tokenizer, step)

    def stream(self, prompts: Sequence[str], sampling: Sampling) -> Iterator[list[int | None]]:
        """Continue prompts, a token a step.

        Args:
            prompts: at least one; an empty one begins a document.
            sampling: how tokens are drawn and how many.

        Returns:
            An iterator over steps: for each prompt the next token, or None when it has ended. It stops after
            `sampling.tokens` steps, or when all have ended.
        """
        rows = [[self.tokenizer.bos, *self.tokenizer.encode(prompt)] for prompt in prompts]
        lengths = np.array([len(row) for row in rows])
        width = _rounded(int(lengths.max()))
        shape = (len(rows), width)
        at = np.arange(width)[None] < lengths[:, None]
        tokens = np.zeros(shape, np.int32)
        tokens[at] = np.concatenate(rows)
        batch = {
            "tokens": tokens,
            "positions": np.broadcast_to(np.arange(width, dtype=np.int32), shape),
            "segments": at.astype(np.int32),
        }
        cache = empty_cache(self.model, len(rows), _rounded(int(lengths.max()) + sampling.tokens))
        seeds = np.array([zlib.crc32(prompt.encode()) for prompt in prompts], np.uint32)
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(sampling.seed)))(seeds)
        ended = [False] * len(rows)
        step = jax.jit(partial(_step, self.model, self.tokenizer.vocab_size, sampling), donate_argnums=2)
        for count in range(sampling.tokens):
            drawn, cache = step(self.params, batch, cache, keys, count)
            chosen = np.asarray(drawn)
            # A prompt that has ended goes on in silence; nobody looks at what it draws.
            yield [
                None if over or token in self.tokenizer.stop_ids else int(token)
                for over, token in zip(ended, chosen.tolist(), strict=True)
            ]
            ended = [over or token in self.tokenizer.stop_ids for over, token in zip(ended, chosen, strict=True)]
            if all(ended):
                return
            batch = {
                "tokens": chosen[:, None].astype(np.int32),
                "positions": (lengths + count)[:, None].astype(np.int32),
                "segments": np.ones((len(rows), 1), np.int32),
            }


def _rounded(length: int) -> int:
    return -(-length // _STEP) * _STEP


def _step(
    model: Model, vocab_size: int, sampling: Sampling, params: Any, batch: Any, cache: Any, keys: Any, count: Any
) -> tuple[jax.Array, Any]:
    """One token for each row: token_B and the cache."""
    logits_B1V, cache = decode(model, params, batch, cache, last_only=True)
    known_V = jnp.arange(logits_B1V.shape[-1]) < vocab_size  # a model may have room for more than the tokenizer's
    logits_BV = jnp.where(known_V, logits_B1V[:, 0], -jnp.inf)
    if not sampling.temperature:
        return jnp.argmax(logits_BV, axis=-1), cache
    drawn_B = jax.vmap(partial(sampling.draw, count=count))(keys, logits_BV)
    return drawn_B, cache
