"""TLS material for the way to a controller, whichever protocol it speaks."""

import msgspec

from rackloom.errors import Refused


class TlsMaterial(msgspec.Struct, frozen=True, kw_only=True):
    """PEM contents; all optional."""

    ca: bytes | None = None
    """Trusted instead of the built-in roots."""
    certificate: bytes | None = None
    """Client certificate, for controllers that ask for one (mTLS)."""
    key: bytes | None = None
    authority: str | None = None
    """Name to expect in the controller's certificate; the host of the URL where None."""

    def __post_init__(self) -> None:
        """Refuse half of a client identity."""
        if (self.certificate is None) != (self.key is None):
            raise Refused(
                "a client certificate and its key go together", nearest_fix="give both, or neither of them"
            )
