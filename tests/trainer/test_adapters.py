"""Chains are cut where the dearest stage is cheapest, and the step knows where shared parameters live."""

import itertools
import random
from typing import Any

import pytest
from trainer.runs import demo_optimizer

from jax_titan.models.llama import LlamaConfig, llama
from jax_titan.trainer.adapters import Step, cut_chain

ADAMW = demo_optimizer()


def small(**changes):
    sizes: dict[str, Any] = {
        "layers": 4,
        "dim": 16,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "ffn_dim": 32,
        "vocab_size": 40,
    }
    return llama(LlamaConfig(**(sizes | {"dtype": "float32", "sequence_length": 16} | changes)))


def test_no_cut_is_better_than_the_chosen_one():
    generator = random.Random(0)
    for _ in range(60):
        costs = [generator.choice([0.01, 1.0, generator.random() * 5]) for _ in range(generator.randint(1, 8))]
        for stages in range(1, len(costs) + 1):
            sizes = cut_chain(costs, stages)
            assert sum(sizes) == len(costs)
            assert min(sizes) >= 1
            bounds = itertools.combinations(range(1, len(costs)), stages - 1)
            best = min(
                max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cut, len(costs)])) for cut in bounds
            )
            chosen = [0, *itertools.accumulate(sizes)]
            assert max(sum(costs[a:b]) for a, b in itertools.pairwise(chosen)) == pytest.approx(best)


def test_equal_layers_between_cheap_ends_are_shared_out_evenly():
    assert cut_chain([0.1, 1, 1, 1, 1, 0.2], 4) == [2, 1, 1, 2]
    assert cut_chain([0.1, 1, 1, 1, 1, 1.0], 2) == [4, 2] or cut_chain([0.1, 1, 1, 1, 1, 1.0], 2) == [3, 3]


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_units_are_refused(stages):
    with pytest.raises(ValueError, match=f"3 units cannot be cut into {stages} stages"):
        cut_chain([1, 1, 1], stages)


def test_a_tied_head_needs_a_replica_only_on_another_stage():
    assert Step.cut(small(tied=True), ADAMW, 1).replicas() == {}
    assert Step.cut(small(tied=True), ADAMW, 3).replicas() == {("head", "embed"): 2}
    assert Step.cut(small(), ADAMW, 3).replicas() == {}


def test_every_unit_has_one_stage_in_order():
    for stages in range(1, 7):
        step = Step.cut(small(), ADAMW, stages)
        assert [u.name for units in step.stages for u in units] == [u.name for u in step.model.units]
        assert sorted(step.stage_of.values()) == list(step.stage_of.values())
        assert set(step.stage_of.values()) == set(range(stages))
