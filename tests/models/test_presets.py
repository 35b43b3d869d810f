"""The presets are the published models: their parameters are counted, not quoted."""

import pytest

from jax_titan.config import KEPT_NAMES, load, presets
from jax_titan.models.llama import KEPT_NAMES as OF_THE_MODEL
from jax_titan.trainer.build import build_model

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    model = build_model(load(name, []), vocab_size=0)
    assert model.parameter_count() == PUBLISHED[name]


def test_every_preset_but_the_demo_is_a_published_model():
    assert set(presets()) == {*PUBLISHED, "llama3-debug"}


@pytest.mark.parametrize(
    ("name", "factor"), [("llama3-8b", 1), ("llama3.1-8b", 8), ("llama3.2-1b", 32), ("llama3.2-3b", 32)]
)
def test_the_context_is_stretched_by_the_factor_of_the_model(name, factor):
    assert load(name, []).model.rope_factor == factor


def test_the_configuration_knows_the_values_that_a_layer_may_keep():
    assert KEPT_NAMES == OF_THE_MODEL


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_leaves_most_of_an_80_gb_device_to_activations(name):
    config = load(name, [])
    # float32 each: parameters, two means of the optimizer, the accumulated gradient.
    state_bytes = 16 * PUBLISHED[name]
    assert state_bytes / config.devices_needed < 30e9
