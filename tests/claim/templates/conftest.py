"""Stocks of published machines, and a way to ask for templates in one line."""

from collections.abc import Callable
from functools import cache

import pytest

from rackloom.claim.templates.generate import Generated, generate
from rackloom.claim.templates.hardware import Stock, stock_of_machine
from rackloom.claim.templates.wish import Align, Wish
from rackloom.topology import profiles


@cache
def _stock(name: str) -> Stock:
    return stock_of_machine(profiles.load_machine(name))


@pytest.fixture(scope="session")
def stock_of() -> Callable[[str], Stock]:
    """Fresh nodes of a profile."""
    return _stock


@pytest.fixture(scope="session")
def ask() -> Callable[..., Generated]:
    """The template of a profile (or stock) for GPUs, NICs and an alignment."""

    def template(where: str | Stock, gpus: int, nics: int, align: str, **more: object) -> Generated:
        wish = Wish(gpus=gpus, nics=nics, align=Align(align), **more)
        return generate(wish, _stock(where) if isinstance(where, str) else where)

    return template
