"""The hardware of a profile, as `rackloom claim` and `rackloom place` plan for it.

The drivers are not called: slices and classes are those that they would publish on such a machine.
"""

from collections.abc import Sequence

from rackloom.cli.topology import machine_or_tray
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.core.allocate.objects import DeviceClass, ResourceSlice
from rackloom.topology import profiles
from rackloom.topology.machine import Machine


def machine_of(profile: str) -> Machine:
    """The machine of a profile. For a rack, the machine of its trays."""
    return machine_or_tray(profiles.load_profile(profile), "devices")


def profile_slices(profile: str, nodes: Sequence[str]) -> tuple[ResourceSlice, ...]:
    """The slices that the drivers would publish on nodes with the machine of a profile."""
    machine = machine_of(profile)
    return tuple(slice_ for node in nodes for slice_ in slices_of(machine, node))


def with_built_in_classes(classes: Sequence[DeviceClass]) -> tuple[DeviceClass, ...]:
    """Add the drivers' classes to the given ones, unless a class has the same name."""
    named = {klass.metadata.name for klass in classes}
    return (*classes, *(klass for klass in device_classes() if klass.metadata.name not in named))
