"""Operators as their projects install them, run as processes of this machine instead of as pods.

A Service of type ExternalName leads the API server to the process, so webhooks keep the names and the
certificates that the operator gives them. This module puts the Secret into a folder, as a kubelet does.
"""

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from tests.cluster.control_plane import ControlPlane
from tests.cluster.credentials import MASTERS
from tests.cluster.processes import Child, start
from tests.cluster.renderings.applied import apply, established
from tests.ports import reserved_ports
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.core.cluster.objects import MUTATING_WEBHOOK, SECRET, VALIDATING_WEBHOOK, Object

_HOOKS = {
    "MutatingWebhookConfiguration": MUTATING_WEBHOOK,
    "ValidatingWebhookConfiguration": VALIDATING_WEBHOOK,
}
_KEPT = ("Namespace", "CustomResourceDefinition", "Secret", *_HOOKS)
_NO_ADDRESS = "0"
"""controller-runtime serves nothing there."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A controller of the kubebuilder layout."""

    name: str
    program: Path
    source: Path
    config: Object
    """Its configuration file, except addresses and folders."""
    makes_certificate: bool = True
    """False if it would wait for a certificate in a machine-wide folder. It gets one from our authority."""

    @property
    def namespace(self) -> str:
        return f"{self.name}-system"


@contextlib.asynccontextmanager
async def installed(operator: Operator, cluster: ControlPlane, api: KubeApi) -> AsyncIterator[None]:
    """The operator at work, its webhooks answering."""
    with reserved_ports() as port:
        async with _installed_at(port, operator, cluster, api):
            yield


@contextlib.asynccontextmanager
async def _installed_at(
    port: int, operator: Operator, cluster: ControlPlane, api: KubeApi
) -> AsyncIterator[None]:
    folder = cluster.logs / operator.name
    folder.mkdir(exist_ok=True)
    documents = await asyncio.to_thread(_documents, operator, port)
    if not operator.makes_certificate:
        _certify(operator, cluster, documents, folder)
    await asyncio.to_thread(apply, cluster, documents)
    await established(api)
    child = _started(operator, cluster, folder, port)
    hooks = [document for document in documents if document["kind"] in _HOOKS]
    try:
        if operator.makes_certificate:
            await _mounted(operator, api, folder)
        await until(lambda: _are_trusted(api, hooks), f"{operator.name} tells the API server whom to trust")
        await until(lambda: _listens(port), f"{operator.name} listens")
        yield
    finally:
        child.stop()
        # The webhooks have no server any more, but other operators' objects must still be accepted.
        for hook in hooks:
            with contextlib.suppress(NotFound):
                await api.delete(_HOOKS[hook["kind"]], hook["metadata"]["name"])


def _documents(operator: Operator, port: int) -> list[Object]:
    built = subprocess.run(
        ["kubectl", "kustomize", str(operator.source / "config" / "default")],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    documents = [document for document in yaml.safe_load_all(built.stdout) if document]
    return [
        _at(document, port)
        for document in documents
        if document["kind"] in _KEPT or _is_webhook_service(document)
    ]


def _is_webhook_service(document: Object) -> bool:
    return document["kind"] == "Service" and "webhook" in document["metadata"]["name"]


def _at(document: Object, port: int) -> Object:
    """The document for a process at a port of loopback."""
    if document["kind"] == "Service":
        document["spec"] = {"type": "ExternalName", "externalName": "127.0.0.1"}
    for called in _calls(document):
        called["service"]["port"] = port
    return document


def _calls(document: Object) -> Iterator[Object]:
    """Whom the API server calls, for admission and for conversion."""
    for hook in document.get("webhooks", ()):
        yield hook["clientConfig"]
    conversion = document.get("spec", {}).get("conversion", {}).get("webhook")
    if conversion is not None:
        yield conversion["clientConfig"]


def _certify(operator: Operator, cluster: ControlPlane, documents: Sequence[Object], folder: Path) -> None:
    """A certificate of the control plane's authority, which the webhook's caBundle names."""
    service = f"{operator.name}-webhook-service.{operator.namespace}.svc"
    pair = cluster.credentials.server(operator.name, service)
    shutil.copy(pair.certificate, folder / "tls.crt")
    shutil.copy(pair.key, folder / "tls.key")
    bundle = base64.b64encode(cluster.credentials.authority.read_bytes()).decode()
    for called in (called for document in documents for called in _calls(document)):
        called["caBundle"] = bundle


def _started(operator: Operator, cluster: ControlPlane, folder: Path, port: int) -> Child:
    config = operator.config | {
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(folder)},
        "health": {"healthProbeBindAddress": _NO_ADDRESS},
        "metrics": {"bindAddress": _NO_ADDRESS},
        "leaderElection": {"leaderElect": False},
    }
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    kubeconfig = cluster.kubeconfig(operator.name, MASTERS)
    command = [operator.program, f"--config={file}", f"--kubeconfig={kubeconfig}"]
    return start(operator.name, command, cluster.logs)


async def _mounted(operator: Operator, api: KubeApi, folder: Path) -> None:
    """The certificate is where the kubelet would have put it."""

    async def made() -> Object:
        found = await api.get(SECRET, f"{operator.name}-webhook-server-cert", operator.namespace)
        data: Object = found.get("data") or {}
        return data if "tls.crt" in data else {}

    data = await until(made, f"{operator.name} makes its certificate")
    for name in ("tls.key", "tls.crt"):
        (folder / name).write_bytes(base64.b64decode(data[name]))


async def _are_trusted(api: KubeApi, hooks: list[Object]) -> bool:
    named = [(_HOOKS[hook["kind"]], hook["metadata"]["name"]) for hook in hooks]
    found = [await api.get(kind, name) for kind, name in named]
    return all("caBundle" in called for hook in found for called in _calls(hook))


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
