"""Cutting: the fragments and transfers that a function's names imply, and errors that speak of the names."""

import jax
import jax.numpy as jnp
import pytest
from mpmd.toy import accumulate, microbatches, shapes, weights

from jax_titan.mpmd.annotate import stage
from jax_titan.mpmd.partition import PartitionError, partition
from jax_titan.mpmd.program import Call, Program, Transfer
from jax_titan.mpmd.topology import Topology


def cut(stages, split_backward=False):
    topology = Topology.one_device_a_stage(jax.devices()[:stages])
    meshes = list(topology.meshes)
    w = shapes(weights(stages))
    acc = {"loss": jax.ShapeDtypeStruct((), "float32"), "gradients": w}
    places = {"loss": meshes[-1], "gradients": meshes}
    return partition(
        accumulate(stages),
        (acc, w, {}, shapes(microbatches(1, stages)[0])),
        topology,
        argument_meshes=(places, meshes, {}, {"x": meshes[0], "t": meshes}),
        result_meshes=places,
        donate=(0,),
        split_backward=split_backward,
        name="accumulate",
    ).program


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_each_stage_is_one_forward_and_one_backward(stages):
    program = cut(stages)
    kinds = [(fragment.kind, fragment.stage, fragment.mesh) for fragment in program.fragments]
    forwards = [("F", s, f"mesh{s}") for s in range(stages)]
    assert kinds == forwards + [("B", s, f"mesh{s}") for s in reversed(range(stages))]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_only_activations_and_their_gradients_cross_a_boundary(stages):
    program = cut(stages)
    moves = [(program.values[t.source].mesh, program.values[t.target].mesh) for t in program.transfers()]
    down = [(f"mesh{s}", f"mesh{s + 1}") for s in range(stages - 1)]
    assert moves == down + [(b, a) for a, b in reversed(down)]


def test_a_split_backward_has_weight_gradients_of_its_own_on_all_stages_but_the_first():
    kinds = sorted((f.kind, f.stage) for f in cut(3, split_backward=True).fragments)
    assert kinds == [("B", 0), ("B", 1), ("B", 2), ("F", 0), ("F", 1), ("F", 2), ("W", 1), ("W", 2)]


def test_the_accumulator_is_donated_and_parameters_are_not():
    program = cut(2)
    carried = set(program.donated)
    donated = set()
    for call in program.calls():
        donated |= {call.inputs[i] for i in program.fragments[call.fragment].donated}
    assert {program.inputs[i] for i in carried} <= donated
    others = {value for i, value in enumerate(program.inputs) if i not in carried}
    assert not donated & others


def test_an_argument_that_no_stage_reads_is_not_used():
    program = cut(3)
    targets = len(program.inputs) - 4  # "t", one a stage, comes before "x"
    assert {targets, targets + 1} & program.used_inputs() == set()
    assert {targets + 2, targets + 3} <= program.used_inputs()


def test_a_program_survives_json_and_prints():
    program = cut(3)
    assert Program.from_json(program.to_json()) == program
    text = program.describe()
    assert text.count("\n") == len(program.operations)
    assert "mesh0 -> mesh1: float32[4,8]" in text


def test_operations_read_only_what_was_written_before():
    program = cut(4)
    known = set(program.inputs)
    for operation in program.operations:
        match operation:
            case Call(_, inputs, outputs):
                assert set(inputs) <= known
                known |= set(outputs)
            case Transfer(source, target):
                assert source in known
                known.add(target)
    assert set(program.outputs) <= known


def simple(function, **changes):
    topology = Topology.one_device_a_stage(jax.devices()[:2])
    settings = {"argument_meshes": ("mesh0",), "result_meshes": "mesh1"} | changes
    return partition(function, (jax.ShapeDtypeStruct((4,), "float32"),), topology, **settings)


def two_parts(x):
    return stage("stage1")(jnp.cos)(stage("stage0")(jnp.sin)(x))


def test_an_unassigned_name_is_named():
    with pytest.raises(PartitionError, match="tower"):
        simple(lambda x: stage("tower")(jnp.cos)(stage("stage0")(jnp.sin)(x)))


def test_a_place_that_does_not_exist_is_named():
    with pytest.raises(PartitionError, match="argument mesh 'mesh7' is not in the topology"):
        simple(two_parts, argument_meshes=("mesh7",))


def test_places_that_do_not_fit_the_result_are_refused():
    with pytest.raises(PartitionError, match="result meshes do not fit"):
        simple(two_parts, result_meshes=["mesh1", "mesh1"])


def test_a_stage_visited_twice_is_refused_in_a_schedule_and_accepted_outside_one():
    def there_and_back(x):
        return stage("stage0")(jnp.tanh)(two_parts(x))

    with pytest.raises(PartitionError, match="more than one fragment"):
        simple(there_and_back, result_meshes="mesh0")
    program = simple(there_and_back, result_meshes="mesh0", scheduled=False).program
    assert [fragment.mesh for fragment in program.fragments] == ["mesh0", "mesh1", "mesh0"]


def test_an_assignment_to_a_mesh_that_is_not_there_is_refused():
    topology = Topology.one_device_a_stage(jax.devices()[:2])
    with pytest.raises(ValueError, match="part 'a' is assigned to 'mesh9'"):
        Topology(topology.meshes, {"a": ("mesh9", 0)})
