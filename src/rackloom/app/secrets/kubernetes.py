"""Kubernetes Secrets through the API server: `nmxm/default/auth` is the Secret `rackloom-nmxm-default-auth`.

A Secret that is mounted into the pod needs nothing of this: it is a directory (see `files`).
"""

import base64
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx2

from rackloom.app.secrets.values import Secret, parts, secret_of
from rackloom.errors import Refused, Retry

SECONDS = 10.0


class KubernetesSecrets:
    """The Secrets of one namespace, read as the pod's service account."""

    def __init__(
        self, url: str, namespace: str, account: Path, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        """`account` is the directory that Kubernetes mounts, with `token` and `ca.crt`."""
        self._secrets = f"{url.rstrip('/')}/api/v1/namespaces/{namespace}/secrets"
        self._account = account
        self._transport = transport

    async def read(self, path: str) -> Mapping[str, Secret] | None:
        """The data of the Secret."""
        name = name_of(path)
        reply = await self._ask("GET", f"/{name}")
        if reply.status_code == HTTPStatus.NOT_FOUND:
            return None
        data = _good(reply).json().get("data") or {}
        return {
            field: secret_of(base64.b64decode(value), f"Secret {name}, field {field}")
            for field, value in data.items()
        }

    async def write(self, path: str, fields: Mapping[str, Secret]) -> None:
        """Replace the Secret, or make it."""
        secret = _manifest(name_of(path), fields)
        reply = await self._ask("PUT", f"/{name_of(path)}", secret)
        if reply.status_code == HTTPStatus.NOT_FOUND:
            reply = await self._ask("POST", "", secret)
        _good(reply)

    async def delete(self, path: str) -> None:
        """Delete the Secret."""
        reply = await self._ask("DELETE", f"/{name_of(path)}")
        if reply.status_code != HTTPStatus.NOT_FOUND:
            _good(reply)

    async def _ask(self, method: str, below: str, body: Any = None) -> httpx2.Response:
        try:
            # The token is renewed by the kubelet while we run, so it is read for each request.
            token = (self._account / "token").read_text().strip()
            async with self._client() as client:
                return await client.request(
                    method,
                    self._secrets + below,
                    json=body,
                    headers={"Authorization": f"Bearer {token}"},
                    timeout=SECONDS,
                )
        except OSError as error:
            raise Refused(
                f"no service account at {self._account}: {error.strerror}",
                nearest_fix="run this in a pod that has one, or choose another provider of secrets",
            ) from error
        except httpx2.HTTPError as error:
            raise Retry(f"the API server cannot be asked for secrets: {error}", after=SECONDS) from error

    def _client(self) -> httpx2.AsyncClient:
        if self._transport is not None:
            return httpx2.AsyncClient(transport=self._transport)
        return httpx2.AsyncClient(verify=ssl.create_default_context(cafile=str(self._account / "ca.crt")))


def name_of(path: str) -> str:
    """The name of the Secret: lower case letters, digits, '-' and '.', as Kubernetes wants it."""
    return "rackloom-" + "-".join(parts(path)).lower().replace("_", "-")


def _manifest(name: str, fields: Mapping[str, Secret]) -> dict[str, Any]:
    data = {field: base64.b64encode(value.reveal().encode()).decode() for field, value in fields.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque", "data": data}


def _good(reply: httpx2.Response) -> httpx2.Response:
    """`reply` if it is one of success. Its body is never told: it may be the secret."""
    if reply.is_success:
        return reply
    if reply.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise Retry(f"the API server answered {reply.status_code}", after=SECONDS)
    raise Refused(
        f"the API server answered {reply.status_code} for a Secret",
        nearest_fix="let the service account get, create, update and delete the Secrets named rackloom-*",
    )
