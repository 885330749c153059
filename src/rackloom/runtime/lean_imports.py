"""Imports less of a library than it loads by default: unused modules would stay in memory.

`defer_package` puts off the `__init__` of a package that gathers all its modules. Its modules can be
imported one by one. The `__init__` runs when a program reads a name of the package that is not a module, so
other code sees no difference.

Modules that are imported already stay as they are.
"""

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from threading import RLock
from typing import Any


def defer_package(name: str) -> None:
    """Run the `__init__` of the package `name` no earlier than when a name of it is read.

    Raises ModuleNotFoundError where there is no such package.
    """
    if name in sys.modules:
        return
    spec = find_spec(name)
    if spec is None or spec.loader is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"no package named {name!r}", name=name)
    package, load = module_from_spec(spec), spec.loader.exec_module
    lock, begun = RLock(), False

    def find(attribute: str) -> Any:
        """The value of an attribute that the package does not have yet."""
        nonlocal begun
        submodule = f"{name}.{attribute}"
        try:
            return import_module(submodule)
        except ModuleNotFoundError as error:
            if error.name != submodule:
                raise
        with lock:
            if not begun:
                begun = True
                load(package)
        try:
            return vars(package)[attribute]
        except KeyError:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}") from None

    package.__getattr__ = find  # type: ignore[method-assign]
    sys.modules[name] = package
