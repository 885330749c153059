"""With which options commands reach the site that the doctor examined."""

import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from rackloom.app.config import load
from rackloom.app.config_sections import AdminConfig
from rackloom.prove.doctor.commands import Ways

_EVERY = ("0.0.0.0", "[::]")  # noqa: S104 (what is listened on, not listening)
_KEPT = ("RACKLOOM_ADMIN_CA", "RACKLOOM_ADMIN_CERT", "RACKLOOM_ADMIN_KEY")


def ways_to(
    home: Path | None,
    config: Path | None,
    kubeconfig: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> Ways:
    """How `kubectl` and `rackloom admin` reach what was read from these."""
    if config is None:
        kubectl = _kubectl(kubeconfig, None)
        return Ways(kubectl=kubectl) if home is None else _ways_of_home(home, kubectl)
    found = load(config)
    cluster = found.kubernetes
    if kubeconfig is None and cluster is not None:
        kubectl = _kubectl(cluster.kubeconfig, cluster.context)
    else:
        kubectl = _kubectl(kubeconfig, None)
    if found.admin is None:
        lacks = f"{config} has no section [admin]: without it no admin interface is served"
        return Ways(kubectl=kubectl, admin_lacks=lacks)
    return Ways(kubectl=kubectl, admin=_site(found.admin, environment), admin_lacks=_lacks(environment))


def _ways_of_home(home: Path, kubectl: str) -> Ways:
    """The twin's own service has REST alone, where its operator is whoever has a token of its home."""
    return Ways(
        kubectl=kubectl,
        instead=f"rackloom token --home {quote(str(home))} --org demo --role PROVIDER_ADMIN",
        then="rackloom up serves REST alone: with this token it does what elsewhere does",
    )


def _kubectl(kubeconfig: Path | None, context: str | None) -> str:
    file = "" if kubeconfig is None else f"--kubeconfig {quote(str(kubeconfig))}"
    return " ".join(one for one in (file, "" if context is None else f"--context {quote(context)}") if one)


def _site(admin: AdminConfig, environment: Mapping[str, str]) -> str:
    if "RACKLOOM_ADMIN_SITE" in environment:
        return ""
    host, _, port = admin.listen.rpartition(":")
    return f"RACKLOOM_ADMIN_SITE={'localhost' if host in _EVERY else host}:{port}"


def _lacks(environment: Mapping[str, str]) -> str:
    missing = [name for name in _KEPT if name not in environment]
    return f"as an operator, with {', '.join(missing)} set" if missing else ""
