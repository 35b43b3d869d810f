"""Choosing devices: the platform settings that must be made before JAX touches one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_titan.config import Config, ConfigError

if TYPE_CHECKING:
    from jax_titan.mpmd.topology import Device


def choose_devices(config: Config) -> list[Device]:
    """Set JAX up for a run and return the devices that its layout occupies.

    Raises:
        ConfigError: the platform is not there or has too few devices.
    """
    import jax

    # What the user asked of JAX itself stands, unless this run's own setting says otherwise.
    wanted = config.platform.devices or max(config.devices_needed, jax.config.jax_num_cpu_devices)
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
    needed = config.devices_needed
    if len(devices) < needed:
        field = "pipeline.stages" if config.parallel.layout == "mpmd" else "parallel.data"
        raise ConfigError(
            [
                f"{field}: the layout needs {needed} devices and this machine has {len(devices)} "
                f"({devices[0].platform}); use fewer, or --platform.name cpu for virtual devices"
            ]
        )
    return devices[:needed]
