"""tyro, told to take fields, help and booleans from our table."""

from typing import Any

from jax_titan.config.fields import BOOLEANS, FIELDS, SECTIONS
from jax_titan.config.problems import show


def parse[T](cls: type[T], default: T, arguments: list[str], **settings: Any) -> T:
    """tyro's `cli` for a dataclass of sections; raises SystemExit after help, or at the first bad argument."""
    import tyro  # here, for it takes its time and many commands do without
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
        StructConstructorSpec,
        StructFieldSpec,
        StructTypeInfo,
    )

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def boolean(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        # tyro's own booleans are True|False, ours are those of TOML
        if info.type is not bool:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="true|false",
            instance_from_str=lambda texts: BOOLEANS[texts[0]],
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [show(value)],
            choices=tuple(BOOLEANS),
        )

    @registry.struct_rule
    def section(info: StructTypeInfo) -> StructConstructorSpec | None:
        # tyro would look for help in docstrings, ours is in the table
        name = next((name for name, known in SECTIONS.items() if info.type is known), None)
        if name is None:
            return None
        specs = [
            StructFieldSpec(item.key, item.annotation, getattr(info.default, item.key), item.help)
            for item in FIELDS.values()
            if item.section == name
        ]
        return StructConstructorSpec(instantiate=SECTIONS[name], fields=tuple(specs))

    return tyro.cli(
        cls,
        default=default,
        args=arguments,
        registry=registry,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
        **settings,
    )
