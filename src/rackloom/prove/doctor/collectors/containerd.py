"""What containerd is told of CDI: by its own file and those that it imports.

Of a plugin the last file that speaks of it counts, and what earlier ones say of that plugin is gone
(containerd's mergeConfig).
"""

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, TypeVar

from rackloom.prove.doctor.collectors.processes import called
from rackloom.prove.doctor.evidence import CdiSetting
from rackloom.topology.discovery.sysroot import Sysroot

_CONFIG = PurePosixPath("/etc/containerd/config.toml")
_CONFIG_OPTIONS = ("-c", "--config")
_CRI_PLUGIN = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
"""The table that has enable_cdi, by the version of containerd's configuration."""
_CDI_BY_DEFAULT = 3
"""Version of the configuration that only containerd 2 reads, and that has CDI on (containerd 2.0's notes)."""
_MOST_FILES = 64
_MOST_CHARACTERS = 1024 * 1024
"""Of all files together."""
_MOST_DOTS = 100
"""In one line: tomllib's time grows with the square of a key's parts."""
_WILDCARDS = re.compile(r"[*?\[]")

Table = dict[str, Any]
T = TypeVar("T", dict[str, Any], list[Any])


def cdi_setting(host: Sysroot, runtime: str | None) -> CdiSetting:
    """Whether containerd is configured with CDI on; `UNREADABLE` where any of its files is not understood.

    Without `runtime`, what a node's status says of it, the file counts only where containerd is seen running
    and CRI-O is not: Docker has one too, which no kubelet asks.
    """
    if runtime is None and (called(host, "crio") or not called(host, "containerd")):
        return CdiSetting.UNSAID
    try:
        return _setting(list(_configs(host)))
    except (ValueError, RecursionError):
        return CdiSetting.UNREADABLE


def _setting(configs: list[Table]) -> CdiSetting:
    """By the last table of the CRI plugin, else by the version. Raises ValueError as `_version`."""
    first = _version(configs[0], 1) if configs else 1
    said: object = None
    for config in configs:
        plugins, name = _part(config, "plugins", dict), _CRI_PLUGIN[_version(config, first)]
        if name in plugins:
            said = _part(plugins, name, dict).get("enable_cdi")
    if isinstance(said, bool):
        return CdiSetting.ON if said else CdiSetting.OFF
    if said is not None:
        raise ValueError("enable_cdi is neither true nor false")
    return CdiSetting.ON if first >= _CDI_BY_DEFAULT else CdiSetting.UNSAID


def _version(config: Table, otherwise: int) -> int:
    """Raises ValueError for one that is not known here."""
    version = config.get("version", otherwise)
    if not isinstance(version, int) or version not in _CRI_PLUGIN:
        raise ValueError(f"no version of containerd's configuration: {version}")
    return version


def _configs(host: Sysroot) -> Iterator[Table]:
    """The file, then all that it imports. Raises ValueError and RecursionError for what is no TOML."""
    todo, done, left = [_started_with(host)], set[PurePosixPath](), _MOST_CHARACTERS
    while todo:
        path = todo.pop(0)
        text = None if path in done else _text(host, path)
        done.add(path)
        if text is not None:
            left -= len(text)
            if left < 0 or len(done) > _MOST_FILES:
                raise ValueError("containerd's configuration is too long to be read")
            config = _parsed(text)
            yield config
            todo.extend(_imported(host, path.parent, _part(config, "imports", list)))


def _parsed(text: str) -> Table:
    """Raises ValueError and RecursionError for what is no TOML, or would take too long to be told so."""
    if any(line.count(".") > _MOST_DOTS for line in text.split("\n")):
        raise ValueError("a line has too many dots to be read")
    return tomllib.loads(text)


def _started_with(host: Sysroot) -> PurePosixPath:
    """The file that the running containerd was given: distributions such as k3s keep their own.

    Raises ValueError where several were given different ones: which of them kubelet asks is not seen.
    """
    commands = (host.text(f"proc/{one}/cmdline") or "" for one in called(host, "containerd"))
    given = {_given(command.split("\0")) for command in commands} or {_CONFIG}
    if len(given) > 1:
        raise ValueError("several containerd run with different configurations")
    return given.pop()


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
    """The files that patterns name, each relative to the file that imports them.

    Raises ValueError for a pattern of directories, and for more patterns than files are read.
    """
    if len(imports) > _MOST_FILES:
        raise ValueError("containerd's configuration imports too much to be read")
    for pattern in imports:
        at = beside / str(pattern)
        if _WILDCARDS.search(str(at.parent)):
            raise ValueError(f"{at} may be in many directories")
        yield from (at.parent / name for name in host.names(str(at.parent)) if fnmatchcase(name, at.name))


def _part(table: Table, key: str, kind: type[T]) -> T:
    """A part of a table, empty where it has none. Raises ValueError for one of another kind."""
    value = table.get(key, kind())
    if not isinstance(value, kind):
        raise ValueError(f"{key} is no {kind.__name__}")
    return value
