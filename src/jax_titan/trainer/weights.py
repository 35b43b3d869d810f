"""First weights from another run: which checkpoint, and whether it fits."""

from __future__ import annotations

from pathlib import Path

from jax_titan.config import Config, ConfigError
from jax_titan.models.unit import Model
from jax_titan.trainer.checkpoint import Checkpoints
from jax_titan.trainer.state import Load


def weights_to_start_from(config: Config, model: Model, tokenizer_digest: str) -> Load | None:
    """What reads the parameters of `model.init_from`; None when the run starts from random ones or goes on.

    Args:
        config: of the new run.
        model: the new run's.
        tokenizer_digest: the new run's.

    Raises:
        ConfigError: there is no checkpoint, or its model or its tokenizer is another one.
    """
    if not config.model.init_from or (config.run_dir / "checkpoints").is_dir():
        return None
    directory = Path(config.model.init_from) / "checkpoints"
    checkpoints = Checkpoints(directory, keep=None)
    step = checkpoints.latest_step
    if step is None:
        raise ConfigError([f"model.init_from: {directory} has no checkpoint; name a run that has saved one"])
    saved, wanted = checkpoints.shapes(step), model.shapes
    if differences := _differences(saved, wanted):
        raise ConfigError([f"model.init_from: {directory / str(step)} does not fit this model: {differences}"])
    digest = checkpoints.facts(step).get("tokenizer_digest")
    if digest not in (None, tokenizer_digest):
        raise ConfigError(
            [
                f"model.init_from: {config.model.init_from} was trained with another tokenizer; give that one as "
                "data.tokenizer and data.tokenizer_file"
            ]
        )
    return lambda abstract: checkpoints.restore_params(step, abstract)


def _differences(saved: dict, wanted: dict) -> str:
    """The first difference between two trees of shapes by unit and leaf, and how many more there are."""
    found = []
    for unit in {**wanted, **saved}:
        for leaf in {**wanted.get(unit, {}), **saved.get(unit, {})}:
            there, here = (tree.get(unit, {}).get(leaf) for tree in (saved, wanted))
            if there is None or here is None:
                found.append(f"{unit} {leaf} is only {'there' if here is None else 'here'}")
            elif there.shape != here.shape:
                found.append(f"{unit} {leaf} is {list(there.shape)} there and {list(here.shape)} here")
            elif there.dtype != here.dtype:
                found.append(f"{unit} {leaf} is {there.dtype} there and {here.dtype} here")
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""
