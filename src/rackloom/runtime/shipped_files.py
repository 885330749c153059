"""Files that the project ships beside its code, such as example manifests and pinned requirements.

In an installed wheel they are inside the package, in a checkout at the root of the repository.
pyproject.toml (`force-include`) names those that the wheel takes along.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parents[1]


def shipped_path(name: str) -> Path:
    """The path of the file or directory `name`, relative to the package or to the checkout."""
    installed = _PACKAGE / name
    return installed if installed.exists() else _CHECKOUT / name
