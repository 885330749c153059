"""The pytest plugin, as another project meets it."""

import subprocess
import sys
import textwrap

import pytest
from tests.waiting import PATIENCE

HERS = """
import pytest

pytestmark = pytest.mark.rackloom(seed="7", in_process=True)


@pytest.mark.rackloom(seed="7", faults=["switch-stops"], in_process=True)
def test_own(rackloom_site):
    assert rackloom_site.seed == "7"
    assert rackloom_site.do("switch-answers")


@pytest.mark.rackloom(scope="session", seed="8", faults=[{"do": "gpu-lost", "gpu": "rack-01/slot-0/gpu-0"}])
def test_shared(rackloom_site):
    rackloom_site.expect("devices", driver="gpu.nvidia.com", tray="rack-01/slot-0", count=1, tainted=True)
    test_shared.url = rackloom_site.url


@pytest.mark.rackloom(scope="session", seed=8, racks=1)
def test_the_same_site_healed(rackloom_site):
    assert rackloom_site.url == test_shared.url
    rackloom_site.expect("devices", driver="gpu.nvidia.com", tray="rack-01/slot-0", count=0, tainted=True)
    assert False, "to see the report"


@pytest.mark.rackloom(rack=2)
def test_wrong_option(rackloom_site):
    pass


@pytest.mark.rackloom(scope="module")
def test_wrong_scope(rackloom_site):
    pass
"""


def run_pytest(folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5 * PATIENCE)


@pytest.mark.slow
def test_fixture_marker_and_scopes(tmp_path):
    (tmp_path / "test_hers.py").write_text(HERS)
    done = run_pytest(tmp_path, "-W", "error")
    assert "2 passed" in done.stdout, done.stdout
    assert "1 failed, " in done.stdout
    assert "2 errors" in done.stdout
    assert "does not know rack: it takes racks, profile" in done.stdout
    assert "scope='module'): it is one of function, session" in done.stdout
    assert "- rackloom site -" in done.stdout
    assert "seed '8', 1 x gb200-nvl72, at http://127.0.0.1:" in done.stdout


@pytest.mark.slow
def test_each_worker_of_xdist_has_sites_of_its_own(tmp_path):
    (tmp_path / "test_hers.py").write_text(
        textwrap.dedent("""
        import os
        from pathlib import Path

        import pytest


        @pytest.mark.rackloom(scope="session")
        @pytest.mark.parametrize("number", range(4))
        def test_shared(rackloom_site, number):
            rackloom_site.expect("node", tray="rack-01/slot-0")
            Path(f"{os.environ['PYTEST_XDIST_WORKER']}-{number}").write_text(rackloom_site.url)
    """)
    )
    done = run_pytest(tmp_path, "-n", "2", "-W", "error")
    assert "4 passed" in done.stdout, done.stdout
    urls = {(file.name.partition("-")[0], file.read_text()) for file in tmp_path.glob("gw*")}
    assert len(urls) == len({url for _, url in urls}) == 2


def test_a_system_that_is_not_supported_is_named(tmp_path):
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent("""
        import pytest


        @pytest.fixture
        def windows(monkeypatch):
            monkeypatch.setattr("sys.platform", "win32")
        """)
    )
    (tmp_path / "test_windows.py").write_text("def test_windows(windows, rackloom_site):\n    pass\n")
    done = run_pytest(tmp_path)
    assert "rackloom: runs on Linux and macOS; on Windows use the Windows Subsystem" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.slow
def test_it_is_there_and_costs_nothing_where_nobody_uses_it(tmp_path):
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent("""
        import sys

        def pytest_terminal_summary(terminalreporter):
            loaded = sorted(name for name in sys.modules if name.startswith("rackloom"))
            terminalreporter.write_line("loaded " + " ".join(loaded))
    """)
    )
    (tmp_path / "test_none.py").write_text("def test_none():\n    pass\n")
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "loaded rackloom rackloom.pytest_plugin\n" in done.stdout
    assert "rackloom(racks=1" in run_pytest(tmp_path, "--markers").stdout
    assert "rackloom_site" in run_pytest(tmp_path, "--fixtures").stdout
