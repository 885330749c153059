"""Proxies of the environment that answer nothing."""

import pytest


def with_dead_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a port without a listener as the proxy for all schemes."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
