"""Rackloom installs like any Python project: from a clean checkout, into an empty environment and home.

pip and uv build it in isolation, in an environment that has the build backend alone.
"""

import os
import sys
import tarfile
from pathlib import Path

import pytest
from tests.install.commands import ASKED_BY, UV, output_of
from tests.install.interpreters import old_interpreter

from rackloom import __version__

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        ASKED_BY not in os.environ, reason=f"NO ISOLATED BUILDS: `make test-install` makes them ({ASKED_BY})"
    ),
]
VERSION = f"{__version__}\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def old_python() -> Path:
    found = old_interpreter()
    if found is None:
        pytest.skip("NO PYTHON BEFORE 3.11 here: Debian's pypy3 is one")
    return found


def test_pip_installs_a_checkout_and_a_repository(checkout: Path, home: Path, tmp_path: Path) -> None:
    output_of(sys.executable, "-m", "venv", tmp_path / "venv")
    pip, rackloom = tmp_path / "venv/bin/pip", tmp_path / "venv/bin/rackloom"
    output_of(pip, "install", "--quiet", "--no-compile", ".", home=home, cwd=checkout)
    assert output_of(rackloom, "version", home=home) == VERSION
    output_of(pip, "uninstall", "--quiet", "--yes", "rackloom", home=home)
    output_of(pip, "install", "--quiet", "--no-compile", f"git+file://{checkout}", home=home)
    assert output_of(rackloom, "version", home=home) == VERSION


def test_the_sdist_and_its_wheel_install(wheel: Path, checkout: Path, home: Path, tmp_path: Path) -> None:
    """`uv build` makes the sdist, then the wheel from the sdist."""
    built = tmp_path / "built"
    output_of(UV, "build", "--quiet", "--python", sys.executable, "--out-dir", built, checkout, home=home)
    (sdist,), (of_the_sdist,) = built.glob("*.tar.gz"), built.glob("*.whl")
    assert of_the_sdist.name == wheel.name
    with tarfile.open(sdist) as archive:
        assert f"{sdist.name.removesuffix('.tar.gz')}/pyproject.toml" in archive.getnames()
    output_of(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv", home=home)
    install = (UV, "pip", "install", "--quiet", "--python", tmp_path / "venv/bin/python")
    for made in (sdist, of_the_sdist):
        output_of(*install, "--reinstall-package", "rackloom", made, home=home)
        assert output_of(tmp_path / "venv/bin/rackloom", "version", home=home) == VERSION


def test_uvx_passes_over_an_old_python(wheel: Path, old_python: Path, home: Path, tmp_path: Path) -> None:
    """The old one is first on the PATH. uvx reads from the metadata that it needs the newer one behind it."""
    for name, target in (("old", old_python), ("new", Path(sys.executable).resolve())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "python3").symlink_to(target)
    path = f"{tmp_path / 'old'}:{tmp_path / 'new'}:{os.defpath}"
    shown = output_of("python3", "-c", "import sys; print(sys.version_info < (3, 11))", path=path)
    assert shown == "True\n"
    no_other = ("--no-python-downloads", "--no-managed-python")
    found = output_of(UV, "python", "find", *no_other, home=home, path=path)
    assert Path(found.strip()).resolve() == old_python
    printed = output_of(
        *(UV, "tool", "run", "--quiet", *no_other, "--from", wheel, "rackloom", "version"),
        home=home,
        path=path,
    )
    assert printed == VERSION


def test_an_installer_of_an_old_python_refuses(
    wheel: Path, old_python: Path, home: Path, tmp_path: Path
) -> None:
    command = (UV, "pip", "install", "--python", old_python, "--target", tmp_path / "target", wheel)
    assert "Python>=3.11" in output_of(*command, home=home, rc=1)
