"""The draft: a configuration while it is read, layer over layer, problems and all."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jax_titan.config.fields import FIELDS, Field, Value


@dataclass
class Draft:
    """A configuration while it is read: the good values so far, the fields that have none, and why."""

    values: dict[str, Value] = field(default_factory=lambda: {name: item.default for name, item in FIELDS.items()})
    bad: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def set(self, name: str, read: Callable[[Field], Value], where: str = "") -> None:
        """Take the value that `read` finds for a field, or note the problem."""
        try:
            value = read(FIELDS[name])
            if objection := FIELDS[name].objection(value):
                raise ValueError(objection)
        except ValueError as error:
            self.refuse(name, f"{where}{name}: {error}")
        else:
            self.values[name] = value

    def refuse(self, name: str, problem: str) -> None:
        """Note that a field has no good value, and why."""
        self.bad.add(name)
        self.problems.append(problem)
