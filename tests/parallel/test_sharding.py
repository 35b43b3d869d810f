"""Logical axes to mesh axes: one table, equal parts, and constraints that cost nothing without a mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from jax_titan.parallel.mesh import Degrees, make_mesh
from jax_titan.parallel.sharding import (
    RULES,
    constrain,
    divisible,
    parts_of,
    spec_of,
    whole_dimensions,
)

SIZES = {"data": 2, "fsdp": 2, "tensor": 4}


def test_parameters_are_split_by_fsdp_along_their_width_and_by_tensor_along_the_rest():
    assert spec_of(("embed", "heads", "head_dim"), (8, 4, 16), SIZES) == ("fsdp", "tensor")
    assert spec_of(("vocab", "embed"), (64, 8), SIZES) == ("tensor", "fsdp")
    assert spec_of(("embed",), (8,), SIZES) == ("fsdp",)


def test_the_batch_is_split_by_data_and_fsdp_and_the_width_of_activations_by_nothing():
    assert spec_of(("batch", "sequence", "activation_embed"), (8, 5, 7), SIZES) == (("data", "fsdp"),)
    assert spec_of(("batch", "sequence", "ffn"), (8, 5, 8), SIZES) == (("data", "fsdp"), None, "tensor")


def test_what_the_axes_do_not_divide_stays_whole_and_is_told():
    assert spec_of(("vocab", "embed"), (258, 8), SIZES) == (None, "fsdp")
    assert whole_dimensions(("vocab", "embed"), (258, 8), SIZES) == [("vocab", 258)]
    assert whole_dimensions(("vocab", "embed"), (256, 8), SIZES) == []
    assert whole_dimensions(("vocab", "embed"), (258, 8), {**SIZES, "tensor": 1}) == []
    assert divisible([("data", "fsdp")], [2], SIZES) == ("data",)  # the first axis divides, both do not
    assert divisible([("data", "fsdp")], [3], SIZES) == ()


def test_parts_count_every_axis_of_a_spec():
    assert parts_of((("data", "fsdp"), None, "tensor"), SIZES) == 16
    assert parts_of((), SIZES) == 1


def test_an_unknown_axis_and_a_wrong_number_of_axes_are_named():
    with pytest.raises(ValueError, match="logical axis 'width' is not in the table"):
        spec_of(("width",), (8,), SIZES)
    with pytest.raises(ValueError, match="1 logical axes"):
        spec_of(("embed",), (8, 8), SIZES)


def test_the_table_speaks_of_axes_that_meshes_have():
    assert {axis for axes in RULES.values() for axis in axes} == set(Degrees().sizes)


def test_a_constraint_changes_nothing_without_a_mesh():
    x = jnp.ones((4, 4))
    assert constrain(x, ("batch", "ffn")) is x
    text = jax.jit(lambda x: constrain(x, ("batch", "ffn")) + 1).lower(x).as_text()
    assert "sharding" not in text


def test_a_constraint_splits_over_the_mesh_that_is_compiled_for():
    mesh = make_mesh(jax.devices()[:4], Degrees(data=2, tensor=2))

    def double(x):
        with use_abstract_mesh(mesh.abstract_mesh):
            return constrain(x * 2, ("batch", "ffn"))

    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, PartitionSpec()))
    wanted = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
    assert jax.jit(double)(x).sharding.is_equivalent_to(wanted, 2)
