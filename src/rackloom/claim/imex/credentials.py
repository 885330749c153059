"""The daemon's TLS material on disk: whether it is there, and whether it has changed."""

import hashlib
from pathlib import Path

from rackloom.claim.imex.config import Tls


class Credentials:
    """What kubelet projects of the domain's Secret; None where the domain runs without authentication."""

    def __init__(self, tls: Tls | None) -> None:
        self._paths = () if tls is None else tuple(Path(path) for path in tls.files)

    def fingerprint(self) -> str | None:
        """A digest that changes with the material; None while a file is missing or empty.

        kubelet swaps all files of a Secret at once, behind a symlink.
        """
        digest = hashlib.sha256()
        for path in self._paths:
            try:
                content = path.read_bytes()
            except OSError:
                return None
            if not content:
                return None
            digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()
