"""`rackloom.client` has its documented names, and no others."""

import ast
from pathlib import Path

import pytest

import rackloom.client


def declared() -> set[str]:
    """The names that type checkers see."""
    tree = ast.parse(Path(rackloom.client.__file__).read_text())
    imported = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.asname for node in imported for alias in node.names if alias.asname}


def test_each_declared_name_is_there_at_run_time() -> None:
    assert "AsyncClient" in declared()
    assert all(getattr(rackloom.client, name) is not None for name in declared())


@pytest.mark.parametrize("name", ["Any", "Sequence", "httpx", "__all__", "connections"])
def test_a_name_that_a_module_merely_imports_is_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(rackloom.client, name)
