"""The address of a service, the organisation, and the token.

A token is a text, a file, or a function. The file is read, or the function called, before every request. So
a renewed token takes effect at once, and the file may be a mounted secret. No token is part of a `repr`, a
log line or a URL, and none goes over a connection without TLS, except to this host.
"""

import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from rackloom.errors import Refused, file_error_text
from rackloom.serving.loopback import is_this_host

Token = str | Path | Callable[[], str]
TenantPath = "/v2/org/{}/nico/"


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a service, and the credentials of its caller."""

    url: str
    """For example `https://site.example`, without path and query."""
    org: str
    token: Token
    ca: Path | ssl.SSLContext | None = None
    """The authority that signed the certificate of the service, as PEM, or a whole TLS context, for example
    with a client certificate. None means the authorities that this system trusts."""

    def __repr__(self) -> str:
        return f"Connection(url={self.url!r}, org={self.org!r})"

    def base_url(self) -> str:
        """The base URL of the operations. Raises Refused if it cannot be used."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise Refused(
                f"{self.url!r} is not the address of a service",
                nearest_fix="give https://HOST or https://HOST:PORT",
            )
        if parts.scheme == "http" and not is_this_host(parts.hostname):
            raise Refused(
                f"a token would go to {parts.hostname} in plain text",
                nearest_fix=f"use https://{parts.netloc}",
            )
        if not self.org or self.org in (".", ".."):
            raise Refused(f"{self.org!r} cannot be an organisation", nearest_fix="name the organisation")
        path = parts.path.partition("/v2/org/")[0].rstrip("/")
        return f"{parts.scheme}://{parts.netloc}{path}" + TenantPath.format(quote(self.org, safe=""))

    def may_use_proxy(self) -> bool:
        """Whether a proxy of the environment may carry the requests: it cannot reach this host's loopback."""
        return not is_this_host(urlsplit(self.url).hostname or "")

    def authorization(self) -> str:
        """The value of the header. Raises Refused if the token cannot be read or sent."""
        token = self._read().strip()
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise Refused(
                f"{self._source()} is no token", nearest_fix="give the token alone, without `Bearer`"
            )
        return f"Bearer {token}"

    def tls(self) -> ssl.SSLContext | bool:
        """The TLS settings. Raises Refused if the authority cannot be read."""
        if self.ca is None:
            return True
        if isinstance(self.ca, ssl.SSLContext):
            return self.ca
        try:
            return ssl.create_default_context(cafile=str(self.ca))
        except OSError as error:
            problem = "it has no certificate" if isinstance(error, ssl.SSLError) else error.strerror
            raise Refused(
                f"{self.ca} is no authority: {problem}", nearest_fix="give a file with PEM"
            ) from error

    def _read(self) -> str:
        if isinstance(self.token, str):
            return self.token
        if callable(self.token):
            return self.token()
        try:
            return self.token.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"{self.token} cannot be read: {file_error_text(error)}") from error

    def _source(self) -> str:
        return str(self.token) if isinstance(self.token, Path) else "what was given as token"
