"""Choosing devices: the platform settings that must be made before JAX touches one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_titan.config import Config, ConfigError
from jax_titan.config.checks import field_of
from jax_titan.config.sections import VIRTUAL_DEVICES
from jax_titan.parallel.mesh import AXES

if TYPE_CHECKING:
    from jax_titan.mpmd.topology import Device


def choose_devices(config: Config) -> list[Device]:
    """Set JAX up for a run and return the devices that its layout occupies.

    Raises:
        ConfigError: the platform is not there or has too few devices.
    """
    import jax

    needed = config.devices_needed
    if config.platform.name == "cpu" and needed > VIRTUAL_DEVICES:
        raise _too_many(config, None)
    # What the user asked of JAX itself stands, unless this run's own setting says otherwise.
    virtual = needed if needed <= VIRTUAL_DEVICES else 1
    wanted = config.platform.devices or max(virtual, jax.config.jax_num_cpu_devices)
    try:
        if config.platform.name:
            jax.config.update("jax_platforms", config.platform.name)
        if config.platform.name in ("", "cpu"):
            # Concerns the CPU alone; ignored when another platform is picked.
            jax.config.update("jax_num_cpu_devices", wanted)
        if config.model.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
    except RuntimeError:
        pass  # JAX is running already in this process: take the devices that it has
    try:
        devices = jax.devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError([f"platform.name: {config.platform.name!r} is not available here ({reason})"]) from error
    if len(devices) < needed:
        cpu = devices[0].platform == "cpu" and needed > VIRTUAL_DEVICES
        raise _too_many(config, None if cpu else f"this machine has {len(devices)} ({devices[0].platform})")
    return devices[:needed]


def _too_many(config: Config, have: str | None) -> ConfigError:
    """The refusal in one line that names the field with the most parts; no `have` is the limit of the CPU."""
    fields = {"pipeline.stages": config.pipeline.stages} if config.parallel.layout == "mpmd" else {}
    for axis in AXES:
        fields[field_of(config, axis)] = max(degrees.sizes[axis] for degrees in config.degrees)
    largest = max(fields, key=fields.__getitem__)
    limit = have or f"platform cpu makes at most {VIRTUAL_DEVICES} virtual ones"
    way_out = ", or --platform.name cpu for virtual devices" if have else ""
    return ConfigError(
        [f"{largest}: the layout needs {config.devices_needed} devices and {limit}; use fewer{way_out}"]
    )
