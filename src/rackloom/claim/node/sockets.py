"""The sockets on which a driver's plugin answers, in the directories where kubelet looks for them.

A plugin that was killed leaves its sockets behind, so a socket alone proves nothing: it is connected to.
kubelet itself listens on none of them.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

ANSWER_SECONDS = 1.0


def answering(home: Path, registry: Path, driver: str) -> Iterator[str]:
    """Sockets of plugins of `driver` on which a process answers, in words.

    `home` is the plugin's directory, `registry` kubelet's plugins_registry. Plugins that run in two releases
    at a time have the UID of their pod in the names of their sockets.
    """
    for path in sorted((*home.glob("*.sock"), *registry.glob(f"{driver}*.sock"))):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(ANSWER_SECONDS)
            try:
                client.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError as error:
                yield f"{path} cannot be asked: {error.strerror or error}"
                continue
        yield f"it answers on {path}"
