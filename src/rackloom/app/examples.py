"""Where the example manifests lie: beside the package when it was installed, beside the sources otherwise."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def example(name: str) -> Path:
    """The directory of one example."""
    installed = _PACKAGE / "examples"
    root = installed if installed.is_dir() else _PACKAGE.parents[1] / "examples"
    return root / name
