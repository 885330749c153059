"""The API server calls a webhook on loopback over TLS and follows its answer."""

import json
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, Rejected
from rackloom.core.cluster.objects import CONFIG_MAP, VALIDATING_WEBHOOK, Object

pytestmark = pytest.mark.anyio
WHY = "this name is not wanted here"
NAME = "names.test.example.com"


class Webhook(BaseHTTPRequestHandler):
    """Refuses objects that are called `unwanted`."""

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = review["request"]
        allowed = request["name"] != "unwanted"
        answer = {"uid": request["uid"], "allowed": allowed, "status": {"message": WHY}}
        body = json.dumps({**review, "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def webhook(cluster: ControlPlane) -> Iterator[str]:
    """The URL of a webhook server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    pair = cluster.credentials.server("webhook")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}/validate"
    server.shutdown()
    server.server_close()
    thread.join()


def configuration(cluster: ControlPlane, url: str, namespace: str) -> Object:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    authority = b64encode(cluster.credentials.authority.read_bytes()).decode()
    hook = {
        "name": NAME,
        "clientConfig": {"url": url, "caBundle": authority},
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
    }
    return {"metadata": {"name": NAME}, "webhooks": [hook]}


async def test_a_denial_reaches_whoever_asked(
    cluster: ControlPlane, api: KubeApi, webhook: str, namespace: str
) -> None:
    def named(name: str) -> Object:
        return {"metadata": {"name": name, "namespace": namespace}}

    await api.create(VALIDATING_WEBHOOK, configuration(cluster, webhook, namespace))

    async def denied() -> str:
        try:
            await api.create(CONFIG_MAP, named("unwanted"), dry_run=True)
        except Rejected as error:
            return error.message
        return ""

    assert WHY in await until(denied, "the webhook is called")
    await api.create(CONFIG_MAP, named("wanted"))
    await api.delete(VALIDATING_WEBHOOK, NAME)
