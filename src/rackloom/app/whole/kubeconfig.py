"""The way into the twin's API server for kubectl, the doctor, and whatever else reads a kubeconfig."""

import base64
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rackloom.app.home import write_durably
from rackloom.app.listeners import listening
from rackloom.app.webhook import load_identity
from rackloom.claim.cluster.certificates import issue, new_authority
from rackloom.twin.kube import FakeKube
from rackloom.twin.kube.serving import KubeServing

LOOPBACK, HOST = "127.0.0.1", "localhost"
NAME = "rackloom-twin"


@asynccontextmanager
async def served(kube: FakeKube, user: str, kubeconfig: Path) -> AsyncIterator[str]:
    """Serve `kube` on loopback; gives its URL. `kubeconfig` (0600) is there for as long.

    With TLS, under an authority of its own: client-go sends no token without.
    """
    token = secrets.token_urlsafe(32)
    authority = new_authority(f"{NAME} authority", time.time())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_identity(tls, issue(authority, (HOST,), time.time()))
    async with listening(KubeServing(kube, token, user), f"{LOOPBACK}:0", tls=tls) as port:
        url = f"https://{HOST}:{port}"
        cluster = {
            "server": url,
            "certificate-authority-data": base64.b64encode(authority.certificate).decode(),
        }
        # JSON is YAML.
        content = msgspec.json.encode(_config(cluster, token, user))
        write_durably(kubeconfig, msgspec.json.format(content))
        try:
            yield url
        finally:
            kubeconfig.unlink(missing_ok=True)  # noqa: ASYNC240 (one small file)


def _config(cluster: dict[str, str], token: str, user: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": NAME, "cluster": cluster}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": user, "namespace": "default"}}],
        "current-context": NAME,
    }
