"""What containerd is told of CDI: by its own file and those that it imports, the later over the earlier."""

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from rackloom.topology.discovery.sysroot import Sysroot

_CONFIG = PurePosixPath("/etc/containerd/config.toml")
_CRI_PLUGINS = ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime")
"""The table that has enable_cdi, in version 2 and version 3 of containerd's configuration."""
_CDI_BY_DEFAULT = 3
"""Version of the configuration that only containerd 2 reads, and that has CDI on (containerd 2.0's notes)."""
_MOST_FILES = 64

Table = dict[str, Any]


def cdi_setting(host: Sysroot) -> bool | None:
    """Whether containerd is configured with CDI on; None where it says nothing, or is not understood."""
    try:
        configs = list(_configs(host))
    except (ValueError, RecursionError):
        return None
    said = [value for one in configs for value in _said(one)]
    if said:
        return said[-1]
    version = configs[0].get("version") if configs else None
    return True if isinstance(version, int) and version >= _CDI_BY_DEFAULT else None


def _said(config: Table) -> Iterator[bool]:
    plugins = _table(config.get("plugins"))
    for name in _CRI_PLUGINS:
        value = _table(plugins.get(name)).get("enable_cdi")
        if isinstance(value, bool):
            yield value


def _configs(host: Sysroot) -> Iterator[Table]:
    """The file, then all that it imports. Raises ValueError and RecursionError for what is no TOML."""
    todo, done = [_CONFIG], set[PurePosixPath]()
    while todo and len(done) < _MOST_FILES:
        path = todo.pop(0)
        text = None if path in done else host.whole(str(path))
        done.add(path)
        if text is not None:
            config = tomllib.loads(text)
            yield config
            todo.extend(_imported(host, path.parent, config.get("imports")))


def _imported(host: Sysroot, beside: PurePosixPath, imports: object) -> Iterator[PurePosixPath]:
    """The files that patterns name, each relative to the file that imports them."""
    for pattern in imports if isinstance(imports, list) else ():
        if isinstance(pattern, str):
            at = beside / pattern
            yield from (at.parent / name for name in host.names(str(at.parent)) if fnmatchcase(name, at.name))


def _table(value: object) -> Table:
    return value if isinstance(value, dict) else {}
