"""How the next token is drawn from a model's logits."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What `jax-titan generate` is told.

    Args:
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: only the likeliest `top_k` tokens; 0 for all.
        top_p: only the likeliest tokens that together have this probability; 1 for all.
        seed: of the draws.
        tokens: how many at most.

    Raises:
        ValueError: one line, naming the value and the way out.

    Source: top_p, Holtzman et al. 2019 (arXiv:1904.09751), section 3.1; top_k, Fan et al. 2018 (arXiv:1805.04833).
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    tokens: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature: {self.temperature} is not a temperature; use 0 or more")
        if self.top_k < 0:
            raise ValueError(f"--top_k: {self.top_k} is too small; use 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p: {self.top_p} is not in (0, 1]; use 1 for all tokens")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed: {self.seed} is out of range; use 0 to {2**32 - 1}")
        if not 1 <= self.tokens <= 2**20:
            raise ValueError(f"--tokens: {self.tokens} is out of range; use 1 to {2**20}")

    def draw(self, key: Any, logits_V: Any, count: Any) -> Any:
        """One token.

        Args:
            key: of the prompt.
            logits_V: of the next token; -inf for what cannot be.
            count: tokens drawn before.
        """
        import jax
        import jax.numpy as jnp

        logits_V = logits_V / self.temperature
        if self.top_k or self.top_p < 1:
            order_V = jnp.argsort(-logits_V)
            sorted_V = logits_V[order_V]
            before_V = jnp.cumsum(jax.nn.softmax(sorted_V)) - jax.nn.softmax(sorted_V)
            kept_V = before_V < self.top_p  # the likeliest is always kept
            if self.top_k:
                kept_V &= jnp.arange(len(sorted_V)) < self.top_k
            chosen = jax.random.categorical(jax.random.fold_in(key, count), jnp.where(kept_V, sorted_V, -jnp.inf))
            return order_V[chosen]
        return jax.random.categorical(jax.random.fold_in(key, count), logits_V)
