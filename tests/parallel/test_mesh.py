"""Meshes: their axes, their sizes, and which devices are neighbours."""

import jax
import pytest

from jax_titan.parallel.mesh import AXES, Degrees, make_mesh


def test_neighbouring_devices_share_a_tensor_group():
    mesh = make_mesh(jax.devices()[:8], Degrees(data=2, fsdp=2, tensor=2))
    assert mesh.axis_names == AXES
    assert [d.id for d in mesh.devices[0, 0]] == [0, 1]
    assert [d.id for d in mesh.devices[0, :, 0]] == [0, 2]
    assert [d.id for d in mesh.devices[:, 0, 0]] == [0, 4]


def test_the_number_of_devices_must_be_that_of_the_degrees():
    with pytest.raises(ValueError, match=r"3 devices for a mesh of 4 \(data 2 x tensor 2\)"):
        make_mesh(jax.devices()[:3], Degrees(data=2, tensor=2))
    with pytest.raises(ValueError, match="fsdp: 0 is not a number of parts"):
        Degrees(fsdp=0)


def test_data_and_fsdp_both_split_the_batch():
    assert Degrees(data=2, fsdp=3, tensor=5).batch_parts == 6
    assert Degrees(data=2, fsdp=3, tensor=5).devices == 30
    assert str(Degrees()) == "one device"
