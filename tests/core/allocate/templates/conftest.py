"""Stocks of published machines, and a helper that requests a template in one line."""

from collections.abc import Callable
from functools import cache

import pytest

from rackloom.core.allocate.templates.generate import GeneratedTemplate, generate_template
from rackloom.core.allocate.templates.inventory import HardwareInventory, inventory_of_machine
from rackloom.core.allocate.templates.layout import Align, TemplateRequest
from rackloom.topology import profiles


@cache
def _stock(name: str) -> HardwareInventory:
    return inventory_of_machine(profiles.load_machine(name))


@pytest.fixture(scope="session")
def stock_of() -> Callable[[str], HardwareInventory]:
    """Fresh nodes of a profile."""
    return _stock


@pytest.fixture(scope="session")
def ask() -> Callable[..., GeneratedTemplate]:
    """The template of a profile (or stock) for GPUs, NICs and an alignment."""

    def template(
        where: str | HardwareInventory, gpus: int, nics: int, align: str, **more: object
    ) -> GeneratedTemplate:
        asked = TemplateRequest(gpus=gpus, nics=nics, align=Align(align), **more)
        return generate_template(asked, _stock(where) if isinstance(where, str) else where)

    return template
