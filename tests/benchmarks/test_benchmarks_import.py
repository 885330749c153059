"""Every benchmark finds its imports when it is run by its path, as on its page."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IMPORT = "import runpy, sys; sys.path[0] = {folder!r}; runpy.run_path({path!r}, run_name='imported')"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_finds_its_modules(path: Path, tmp_path: Path) -> None:
    code = IMPORT.format(folder=str(BENCHMARKS), path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
