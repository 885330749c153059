"""What containerd is told of CDI: by its own file and those that it imports, the later over the earlier."""

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, TypeVar

from rackloom.prove.doctor.evidence import CdiSetting
from rackloom.topology.discovery.sysroot import Sysroot

_CONFIG = PurePosixPath("/etc/containerd/config.toml")
_CONFIG_OPTIONS = ("-c", "--config")
_CRI_PLUGINS = ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime")
"""The table that has enable_cdi, in version 2 and version 3 of containerd's configuration."""
_CDI_BY_DEFAULT = 3
"""Version of the configuration that only containerd 2 reads, and that has CDI on (containerd 2.0's notes)."""
_MOST_FILES = 64

Table = dict[str, Any]
T = TypeVar("T", dict[str, Any], list[Any])


def cdi_setting(host: Sysroot) -> CdiSetting:
    """Whether containerd is configured with CDI on; `UNREADABLE` where any of its files is not understood."""
    try:
        configs = list(_configs(host))
        said = [value for one in configs for value in _said(one)]
    except (ValueError, RecursionError):
        return CdiSetting.UNREADABLE
    if said:
        return CdiSetting.ON if said[-1] else CdiSetting.OFF
    version = configs[0].get("version") if configs else None
    return CdiSetting.ON if isinstance(version, int) and version >= _CDI_BY_DEFAULT else CdiSetting.UNSAID


def _said(config: Table) -> Iterator[bool]:
    """Raises ValueError for what containerd would not start with."""
    plugins = _part(config, "plugins", dict)
    for name in _CRI_PLUGINS:
        value = _part(plugins, name, dict).get("enable_cdi")
        if isinstance(value, bool):
            yield value
        elif value is not None:
            raise ValueError("enable_cdi is neither true nor false")


def _configs(host: Sysroot) -> Iterator[Table]:
    """The file, then all that it imports. Raises ValueError and RecursionError for what is no TOML."""
    todo, done = [_started_with(host)], set[PurePosixPath]()
    while todo and len(done) < _MOST_FILES:
        path = todo.pop(0)
        text = None if path in done else _text(host, path)
        done.add(path)
        if text is not None:
            config = tomllib.loads(text)
            yield config
            todo.extend(_imported(host, path.parent, _part(config, "imports", list)))


def _started_with(host: Sysroot) -> PurePosixPath:
    """The file that the running containerd was given: distributions such as k3s keep their own."""
    running = [one for one in host.names("proc") if one.isdecimal() and _is_containerd(host, one)]
    given = {_given((host.text(f"proc/{one}/cmdline") or "").split("\0")) for one in running}
    return given.pop() if len(given) == 1 else _CONFIG


def _is_containerd(host: Sysroot, process: str) -> bool:
    return host.text(f"proc/{process}/comm") == "containerd"


def _given(words: list[str]) -> PurePosixPath:
    for word, following in pairwise([*words, ""]):
        option, _, value = word.partition("=")
        if option in _CONFIG_OPTIONS:
            return PurePosixPath(value or following)
    return _CONFIG


def _text(host: Sysroot, path: PurePosixPath) -> str | None:
    """A file's content; None where there is none. Raises ValueError for one that cannot be read."""
    text = host.whole(str(path))
    if text is None and host.real(str(path)) is not None:
        raise ValueError(f"{path} cannot be read")
    return text


def _imported(host: Sysroot, beside: PurePosixPath, imports: list[Any]) -> Iterator[PurePosixPath]:
    """The files that patterns name, each relative to the file that imports them."""
    for pattern in imports:
        at = beside / str(pattern)
        yield from (at.parent / name for name in host.names(str(at.parent)) if fnmatchcase(name, at.name))


def _part(table: Table, key: str, kind: type[T]) -> T:
    """A part of a table, empty where it has none. Raises ValueError for one of another kind."""
    value = table.get(key, kind())
    if not isinstance(value, kind):
        raise ValueError(f"{key} is no {kind.__name__}")
    return value
