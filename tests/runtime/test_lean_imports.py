"""The parts of a library that are left out, without a difference for other code."""

import subprocess
import sys
from pathlib import Path

import pytest

from rackloom.runtime.lean_imports import defer_package


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """A package that gathers its modules."""
    package = tmp_path / "gathering"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from gathering.heavy import weight\nfrom gathering.light import name\n"
    )
    (package / "heavy.py").write_text("from gathering import light\nweight = len(light.name)\n")
    (package / "light.py").write_text("name = 'light'\n")
    (package / "broken.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "gathering"]:
        del sys.modules[name]


@pytest.mark.usefixtures("libraries")
def test_a_module_is_imported_without_what_its_package_gathers():
    defer_package("gathering")
    from gathering.light import name

    assert name == "light"
    assert "gathering.heavy" not in sys.modules


@pytest.mark.usefixtures("libraries")
def test_a_name_of_the_package_is_found_when_it_is_asked_for():
    defer_package("gathering")
    import gathering.light

    assert gathering.light.name == "light"
    assert "gathering.heavy" not in sys.modules
    assert gathering.weight == len("light")
    assert not hasattr(gathering, "nothing")


@pytest.mark.usefixtures("libraries")
def test_a_module_is_found_as_a_name_of_the_package():
    defer_package("gathering")
    from gathering import light

    assert light.name == "light"
    assert "gathering.heavy" not in sys.modules


@pytest.mark.usefixtures("libraries")
def test_a_module_that_cannot_be_imported_says_what_it_lacks():
    defer_package("gathering")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        from gathering import broken  # noqa: F401


@pytest.mark.usefixtures("libraries")
def test_a_package_that_is_imported_already_stays_as_it_is():
    import gathering

    defer_package("gathering")
    assert sys.modules["gathering"] is gathering
    assert gathering.weight == len("light")


def test_what_is_no_package_is_refused():
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        defer_package("no_such_library")


PLUGINS_LEAVE_OUT = (
    "pyroute2.dhcp",
    "pyroute2.iproute",
    "pyroute2.ndb",
    "sqlite3",
)


def test_the_plugins_of_a_node_load_nothing_that_no_plugin_at_rest_uses():
    program = (
        "import sys, rackloom.app.node.together\n"
        f"print(*[name for name in {PLUGINS_LEAVE_OUT!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert done.stdout.split() == []
