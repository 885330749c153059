"""Attributes that `rackloom claim check` knows without slices."""

from collections.abc import Iterable

from rackloom.core.allocate.driver_slices import typical_slices


def unknown_to_lint(driver: str, published: Iterable[str]) -> set[str]:
    """The published attributes of a driver that the checker would call unpublished."""
    known = {
        name if "/" in name else f"{driver}/{name}"
        for found in typical_slices()
        if found.spec.driver == driver
        for device in found.spec.devices
        for name in device.attributes
    }
    return {name if "/" in name else f"{driver}/{name}" for name in published} - known
