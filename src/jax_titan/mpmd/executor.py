"""Running a partitioned step under a schedule: one flat list of instructions, built once, dispatched every step.

A step is: for every task of the schedule the fragment of its stage and the transfers of its results, then the
update program. `Executor` works out before the first step which slot every array has, who reads it last and what
is moved together; `run` only calls. Everything it calls is asynchronous, so the order of instructions is the order
in which work is queued on the devices, and the host runs ahead of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jax_titan.mpmd.compile import compile_gather, sharding_of
from jax_titan.mpmd.program import Call, Program, Transfer
from jax_titan.mpmd.schedule import Schedule, Task, simulate


class ExecutorError(RuntimeError):
    """The program and the schedule do not fit together."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the flat arguments of an accumulation program are, as counts in argument order.

    Attributes:
        carried: the accumulator: donated, and replaced by the program's results one for one.
        shared: the same arrays for every microbatch (parameters).
        per_microbatch: arrays of one microbatch.
    """

    carried: int
    shared: int
    per_microbatch: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One call or one set of copies.

    Attributes:
        task: what it belongs to; None for the update.
        call: the compiled fragment, or None for copies.
        reads, writes: slots, in argument order.
        donates: slots among `reads` whose memory the call may overwrite.
        targets: for copies, where each goes.
        dead: slots that nobody reads afterwards.
        ends_task: this is the last instruction of its task.
    """

    task: Task | None
    call: Callable[..., Any] | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    donates: tuple[int, ...] = ()
    targets: tuple[Any, ...] = ()
    dead: tuple[int, ...] = ()
    ends_task: bool = False


class Executor:
    """A schedule's instructions over a table of slots.

    The slots are, in this order: `shared` and `carried` arrays of the accumulation, arguments that only the update
    takes, one range a microbatch, and everything in between.

    Args:
        accumulate: the program of one microbatch, `(carried, shared, microbatch) -> carried`.
        roles: what its arguments are.
        schedule: the order of tasks; its stages are those of the program.
        functions: the compiled fragments of `accumulate`, in order.
        meshes: the JAX mesh of every submesh.
        update: optional program that runs after the last microbatch.
        update_functions: its compiled fragments.
        update_reads: for each flat argument of `update`, where it comes from: ("carried", i), ("shared", i) or
            ("extra", i).

    Raises:
        ExecutorError: a task of the schedule has no fragment, or memory would be overwritten before its last use.
    """

    def __init__(
        self,
        accumulate: Program,
        roles: Roles,
        schedule: Schedule,
        functions: Sequence[Callable[..., Any]],
        meshes: Mapping[str, Mesh],
        update: Program | None = None,
        update_functions: Sequence[Callable[..., Any]] = (),
        update_reads: Sequence[tuple[str, int]] = (),
    ):
        if schedule.stages != accumulate.stages:
            raise ExecutorError(f"{schedule.name}: {schedule.stages} stages for a program of {accumulate.stages}")
        if len(accumulate.inputs) != roles.carried + roles.shared + roles.per_microbatch:
            raise ExecutorError(f"{accumulate.name}: its arguments do not match the roles {roles}")
        if len(accumulate.outputs) != roles.carried:
            raise ExecutorError(
                f"{accumulate.name}: returns {len(accumulate.outputs)} arrays, not the carried ones"
            )
        _check_results(accumulate)
        self.schedule = schedule
        self.roles = roles
        self.dispatch = simulate(schedule).dispatch
        self._meshes = meshes
        self._extra = sum(kind == "extra" for kind, _ in update_reads)
        used = accumulate.used_inputs()
        first = roles.carried + roles.shared
        # Only what some stage reads is placed; the others keep a slot that stays empty.
        self.microbatch_inputs = tuple(i - first for i in sorted(used) if i >= first)
        self.microbatch_shardings = tuple(
            sharding_of(accumulate.values[accumulate.inputs[first + i]], meshes) for i in self.microbatch_inputs
        )
        self._slots = 0
        self._shared = self._new_slots(roles.shared)
        self._carried = self._new_slots(roles.carried)
        self._extras = self._new_slots(self._extra)
        self._microbatches = [self._new_slots(len(self.microbatch_inputs)) for _ in range(schedule.microbatches)]
        instructions = self._expand(accumulate, functions)
        if update is None:
            self._results = tuple(self._carried)
        else:
            tables = {"shared": self._shared, "carried": self._carried, "extra": self._extras}
            sources = [tables[kind][i] for kind, i in update_reads]
            _check_distinct(update)
            more, self._results = self._expand_update(update, update_functions, sources)
            instructions += more
        self.instructions = self._with_last_use(instructions)
        self._loop = [(i.call, i.reads, i.writes, i.targets, i.dead) for i in self.instructions]

    def _new_slots(self, count: int) -> range:
        self._slots += count
        return range(self._slots - count, self._slots)

    def _expand(self, program: Program, functions: Sequence[Callable]) -> list[Instruction]:
        tasks = _operations_by_task(program)
        for task in self.dispatch:
            if (task.kind, task.stage) not in tasks:
                why = "; nothing in that stage has a gradient" if task.kind == "B" else ""
                raise ExecutorError(f"{self.schedule.name}: {program.name} has no fragment for {task}{why}")
        scheduled = {(task.kind, task.stage) for task in self.dispatch}
        if left := sorted(tasks.keys() - scheduled):
            raise ExecutorError(f"{self.schedule.name}: never runs {left[0][0]} of stage {left[0][1]}")
        _check_carried(program, tasks, self.roles.carried)
        carried_of = dict(zip(program.outputs, self._carried, strict=True))
        roles = self.roles
        fixed = dict(zip(program.inputs, [*self._carried, *self._shared], strict=False))
        local: list[dict[int, int]] = []
        for slots in self._microbatches:
            first = roles.carried + roles.shared
            local.append(
                {program.inputs[first + i]: slot for i, slot in zip(self.microbatch_inputs, slots, strict=True)}
            )

        def slot_of(value: int, microbatch: int) -> int:
            if value in carried_of:
                return carried_of[value]
            if value in fixed:
                return fixed[value]
            table = local[microbatch]
            if value not in table:
                table[value] = self._new_slots(1)[0]
            return table[value]

        gathers = _gathers(program, self._meshes)
        instructions = []
        for task in self.dispatch:
            group = tasks[task.kind, task.stage]
            made = _instructions(
                task, program, group, functions, gathers, self._meshes, lambda v, m=task.microbatch: slot_of(v, m)
            )
            made[-1] = dataclasses.replace(made[-1], ends_task=True)
            instructions += made
        return instructions

    def _expand_update(
        self, program: Program, functions: Sequence[Callable], sources: Sequence[int]
    ) -> tuple[list[Instruction], tuple[int, ...]]:
        table = dict(zip(program.inputs, sources, strict=True))

        def slot_of(value: int) -> int:
            if value not in table:
                table[value] = self._new_slots(1)[0]
            return table[value]

        instructions = _instructions(
            None,
            program,
            program.operations,
            functions,
            _gathers(program, self._meshes),
            self._meshes,
            slot_of,
        )
        return instructions, tuple(slot_of(value) for value in program.outputs)

    def _with_last_use(self, instructions: list[Instruction]) -> list[Instruction]:
        """Free every slot after its last reader, and prove that nobody reads memory that was given away."""
        kept = set(self._results)
        read_later: set[int] = set(kept)
        result = []
        for instruction in reversed(instructions):
            touched = dict.fromkeys(instruction.reads + instruction.writes)
            dead = tuple(slot for slot in touched if slot not in read_later)
            for donated in instruction.donates:
                if donated in read_later and donated not in instruction.writes:
                    raise ExecutorError(
                        f"{self.schedule.name}: {instruction.task} overwrites an array that is read later"
                    )
            # A carried slot is written again by the instruction that consumed it: alive from there on only.
            read_later -= set(instruction.writes)
            read_later |= set(instruction.reads)
            result.append(dataclasses.replace(instruction, dead=dead))
        given = {*self._shared, *self._carried, *self._extras, *(s for slots in self._microbatches for s in slots)}
        for instruction in instructions:
            if not set(instruction.reads) <= given:
                raise ExecutorError(
                    f"{self.schedule.name}: {instruction.task} comes before what it reads; do the stages' numbers "
                    "follow the data?"
                )
            given |= set(instruction.writes)
        return result[::-1]

    def place(self, microbatches: Sequence[Sequence[Any]]) -> list[list[jax.Array]]:
        """Put host arrays where the stages read them.

        Args:
            microbatches: for each microbatch its flat leaves, in the order of the program's arguments.

        Returns:
            For each microbatch the arrays that `run` takes: only those that some stage reads.
        """
        leaves = [leaves[i] for leaves in microbatches for i in self.microbatch_inputs]
        placed = jax.device_put(leaves, list(self.microbatch_shardings) * len(microbatches))
        width = len(self.microbatch_inputs)
        return [placed[i * width : (i + 1) * width] for i in range(len(microbatches))]

    def run(
        self,
        shared: Sequence[jax.Array],
        carried: Sequence[jax.Array],
        extra: Sequence[jax.Array],
        microbatches: Sequence[Sequence[jax.Array]],
        after_task: Callable[[Task, list[Any]], None] | None = None,
    ) -> list[jax.Array]:
        """Dispatch one step.

        Args:
            shared, carried, extra: flat arrays, placed as the programs expect; what the programs donate is gone
                afterwards, so the caller must not hold the last reference to anything it needs.
            microbatches: as `place` returns them.
            after_task: for inspection: called with the task and the slot table after each task.

        Returns:
            The flat results of the update, or the carried arrays when there is none.
        """
        table: list[Any] = [None] * self._slots
        self._fill(table, self._shared, shared)
        self._fill(table, self._carried, carried)
        self._fill(table, self._extras, extra)
        for index, slots in enumerate(self._microbatches):
            self._fill(table, slots, microbatches[index])
        del shared, carried, extra, microbatches
        if after_task is None:
            self._run(table, self._loop)
        else:
            for instruction, step in zip(self.instructions, self._loop, strict=True):
                self._run(table, [step])
                if instruction.ends_task and instruction.task is not None:
                    after_task(instruction.task, table)
        return [table[slot] for slot in self._results]

    def _fill(self, table: list[Any], slots: range, arrays: Sequence[jax.Array]) -> None:
        if len(slots) != len(arrays):
            raise ExecutorError(f"{self.schedule.name}: {len(arrays)} arrays given for {len(slots)} slots")
        table[slots.start : slots.stop] = arrays

    @staticmethod
    def _run(table: list[Any], loop: Sequence[tuple]) -> None:
        device_put = jax.device_put
        for call, reads, writes, targets, dead in loop:
            if call is not None:
                results = call(*[table[slot] for slot in reads])
            elif len(reads) == 1:
                results = (device_put(table[reads[0]], targets[0]),)
            else:
                results = device_put([table[slot] for slot in reads], list(targets))
            for slot, value in zip(writes, results, strict=True):
                table[slot] = value
            for slot in dead:
                table[slot] = None

    def live_activations(self) -> tuple[int, ...]:
        """For each stage, the most microbatches of which an array made by a forward is kept on it at once.

        Counted from the instructions and their last uses, not from the schedule: what the slots really hold.
        """
        live: list[dict[int, set[int]]] = [{} for _ in range(self.schedule.stages)]
        owner: dict[int, tuple[int, int]] = {}
        peaks = [0] * self.schedule.stages
        carried = set(self._carried)
        for instruction in self.instructions:
            task = instruction.task
            if task is not None and task.kind == "F" and instruction.call is not None:
                for slot in instruction.writes:
                    if slot not in carried and slot not in instruction.dead:
                        owner[slot] = (task.stage, task.microbatch)
                        live[task.stage].setdefault(task.microbatch, set()).add(slot)
            for slot in instruction.dead:
                if slot in owner:
                    stage, microbatch = owner.pop(slot)
                    live[stage][microbatch].discard(slot)
            if task is not None and instruction.ends_task:
                count = sum(1 for slots in live[task.stage].values() if slots)
                peaks[task.stage] = max(peaks[task.stage], count)
        return tuple(peaks)

    @property
    def transfers(self) -> int:
        """Arrays moved from one submesh to another in a step."""
        return sum(len(i.reads) for i in self.instructions if i.call is None)


def _check_distinct(program: Program) -> None:
    """Every result is an array of its own: the next step overwrites each."""
    seen: dict[int, int] = {}
    for position, value in enumerate(program.outputs):
        if value in seen:
            raise ExecutorError(
                f"{program.name}: {program.output_names[seen[value]]} and {program.output_names[position]} are "
                "one array; return one of them only, and make constants depend on what they replace"
            )
        seen[value] = position


def _check_results(program: Program) -> None:
    """Results of an accumulation each take the place of the argument they replace."""
    _check_distinct(program)
    for position, value in enumerate(program.outputs):
        if value in program.inputs and program.inputs.index(value) != position:
            raise ExecutorError(
                f"{program.name}: {program.output_names[position]} is "
                f"{program.input_names[program.inputs.index(value)]} unchanged; only the accumulator may be "
                "returned, each leaf in its own place"
            )


def _check_carried(
    program: Program, tasks: Mapping[tuple[str, int], Sequence[Call | Transfer]], count: int
) -> None:
    """A leaf of the accumulator belongs to one task: between two, other microbatches would have changed it."""
    touched: dict[int, set[tuple[str, int]]] = {}
    for key, group in tasks.items():
        for operation in group:
            reads, writes = _reads_and_writes(operation)
            for value in (*reads, *writes):
                touched.setdefault(value, set()).add(key)
    for position in range(count):
        before, after = program.inputs[position], program.outputs[position]
        users = sorted(touched.get(before, set()) | touched.get(after, set()))
        if len(users) > 1:
            raise ExecutorError(
                f"{program.name}: {program.input_names[position]} is used by "
                f"{' and '.join(f'{kind} of stage {stage}' for kind, stage in users)}, between which other "
                "microbatches change it; use a leaf of the accumulator in one part and one direction only"
            )


def _reads_and_writes(operation: Call | Transfer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(operation, Call):
        return operation.inputs, operation.outputs
    return (operation.source,), (operation.target,)


def _operations_by_task(program: Program) -> dict[tuple[str, int], list[Call | Transfer]]:
    """The call of every (kind, stage), followed by the transfers of what it makes."""
    tasks: dict[tuple[str, int], list[Call | Transfer]] = {}
    maker: dict[int, tuple[str, int]] = {}
    for operation in program.operations:
        if isinstance(operation, Call):
            fragment = program.fragments[operation.fragment]
            key = (fragment.kind, fragment.stage)
            if key in tasks:
                raise ExecutorError(
                    f"{program.name}: stage {fragment.stage} has two {fragment.kind} fragments; each must be "
                    "one connected part"
                )
            tasks[key] = [operation]
            maker.update((value, key) for value in operation.outputs)
        else:
            if operation.source not in maker:
                raise ExecutorError(
                    f"{program.name}: {program.input_names[program.inputs.index(operation.source)]} on "
                    f"{program.values[operation.source].mesh} is read on {program.values[operation.target].mesh} "
                    "too, every microbatch; pass a copy for each stage"
                )
            key = maker[operation.source]
            tasks[key].append(operation)
            maker[operation.target] = key
    return tasks


def _instructions(
    task: Task | None,
    program: Program,
    operations: Sequence[Call | Transfer],
    functions: Sequence[Callable],
    gathers: Mapping[Transfer, Callable],
    meshes: Mapping[str, Mesh],
    slot_of: Callable[[int], int],
) -> list[Instruction]:
    """Operations over slots; copies that follow one another and do not build on each other go in one call.

    What is gathered before a copy has the slot of a value that the program does not have, numbered from -1 down.
    """
    result: list[Instruction] = []
    for operation in operations:
        if isinstance(operation, Call):
            reads = tuple(slot_of(value) for value in operation.inputs)
            writes = tuple(slot_of(value) for value in operation.outputs)
            donates = tuple(reads[i] for i in program.fragments[operation.fragment].donated)
            result.append(Instruction(task, functions[operation.fragment], reads, writes, donates))
            continue
        read, write = slot_of(operation.source), slot_of(operation.target)
        if operation in gathers:
            whole = slot_of(-1 - operation.target)
            result.append(Instruction(task, gathers[operation], (read,), (whole,)))
            read = whole
        target = _target(sharding_of(program.values[operation.target], meshes))
        last = result[-1] if result else None
        if last is not None and last.call is None and read not in last.writes:
            result[-1] = dataclasses.replace(
                last, reads=(*last.reads, read), writes=(*last.writes, write), targets=(*last.targets, target)
            )
        else:
            result.append(Instruction(task, None, (read,), (write,), targets=(target,)))
    return result


def _gathers(program: Program, meshes: Mapping[str, Mesh]) -> dict[Transfer, Callable]:
    """The transfers between submeshes that split a value differently, and what gathers it first."""
    gathers: dict[Transfer, Callable] = {}
    compiled: dict[Any, Callable | None] = {}
    for transfer in program.transfers():
        source, target = program.values[transfer.source], program.values[transfer.target]
        if (source, target) not in compiled:
            compiled[source, target] = compile_gather(source, target, meshes)
        if gather := compiled[source, target]:
            gathers[transfer] = gather
    return gathers


def _target(sharding: jax.sharding.NamedSharding) -> Any:
    """A copy to a single device costs a third less when the device itself is named."""
    return next(iter(sharding.device_set)) if len(sharding.device_set) == 1 else sharding
