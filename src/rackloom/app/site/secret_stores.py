"""Secret providers over the network: Kubernetes Secrets, and Vault (KV version 2).

In Kubernetes, `nmxm/default/auth` is the Secret `rackloom-nmxm-default-auth`, read as the pod's service
account. The token is read for each request, because kubelet renews the file while the process runs. A
Secret that is mounted into the pod needs none of this: it is a directory for the file provider.

In Vault, a secret path is the path below the mount. The client library blocks, so each call runs in a
thread. Vault answers an expired token as it answers a token without rights. After such an answer the
provider logs in again once, and the second answer decides.

Bodies of failed replies and texts of errors are never reported: they may hold data that was sent.
"""

import asyncio
import base64
import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import hvac
import hvac.exceptions
import requests

from rackloom.app.site.secrets import Secret, path_words, secret_of
from rackloom.errors import Refused, Retry
from rackloom.runtime.foreign_text import decode_json

# Kubernetes Secrets.


REQUEST_SECONDS = 10.0


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
        name = secret_name(path)
        reply = await self._ask("GET", f"/{name}")
        if reply.status_code == HTTPStatus.NOT_FOUND:
            return None
        data = decode_json(_checked_reply(reply).content, f"Secret {name}").get("data") or {}
        return {
            field: secret_of(base64.b64decode(value), f"Secret {name}, field {field}")
            for field, value in data.items()
        }

    async def write(self, path: str, fields: Mapping[str, Secret]) -> None:
        """Replace the Secret, or create it."""
        secret = _secret_manifest(secret_name(path), fields)
        reply = await self._ask("PUT", f"/{secret_name(path)}", secret)
        if reply.status_code == HTTPStatus.NOT_FOUND:
            reply = await self._ask("POST", "", secret)
        _checked_reply(reply)

    async def delete(self, path: str) -> None:
        """Delete the Secret."""
        reply = await self._ask("DELETE", f"/{secret_name(path)}")
        if reply.status_code != HTTPStatus.NOT_FOUND:
            _checked_reply(reply)

    async def _ask(self, method: str, below: str, body: Any = None) -> httpx2.Response:
        try:
            # Kubelet renews the token while the process runs, so it is read for each request.
            token = (self._account / "token").read_text().strip()
            async with self._client() as client:
                return await client.request(
                    method,
                    self._secrets + below,
                    json=body,
                    headers={"Authorization": f"Bearer {token}"},
                    timeout=REQUEST_SECONDS,
                )
        except OSError as error:
            raise Refused(
                f"no service account at {self._account}: {error.strerror}",
                nearest_fix="run this in a pod that has one, or choose another provider of secrets",
            ) from error
        except httpx2.HTTPError as error:
            raise Retry(
                f"the API server cannot be asked for secrets: {error}", after=REQUEST_SECONDS
            ) from error

    def _client(self) -> httpx2.AsyncClient:
        if self._transport is not None:
            return httpx2.AsyncClient(transport=self._transport)
        return httpx2.AsyncClient(verify=ssl.create_default_context(cafile=str(self._account / "ca.crt")))


def secret_name(path: str) -> str:
    """The name of the Secret: lower case letters, digits, '-' and '.', as Kubernetes requires."""
    return "rackloom-" + "-".join(path_words(path)).lower().replace("_", "-")


def _secret_manifest(name: str, fields: Mapping[str, Secret]) -> dict[str, Any]:
    data = {field: base64.b64encode(value.reveal().encode()).decode() for field, value in fields.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque", "data": data}


def _checked_reply(reply: httpx2.Response) -> httpx2.Response:
    """`reply` if it reports success. Its body is never reported: it may hold the secret."""
    if reply.is_success:
        return reply
    if reply.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise Retry(f"the API server answered {reply.status_code}", after=REQUEST_SECONDS)
    raise Refused(
        f"the API server answered {reply.status_code} for a Secret",
        nearest_fix="let the service account get, create, update and delete the Secrets named rackloom-*",
    )


# Vault.


T = TypeVar("T")

VAULT_SECONDS = 10.0
VaultLogin = Callable[[hvac.Client], None]


def login_with_token(file: Path) -> VaultLogin:
    """Log in with the token in `file`, which an agent may renew."""

    def login(client: hvac.Client) -> None:
        client.token = file.read_text().strip()

    return login


def login_with_service_account(role: str, token: Path) -> VaultLogin:
    """Log in as the pod's service account."""

    def login(client: hvac.Client) -> None:
        client.auth.kubernetes.login(role=role, jwt=token.read_text().strip())

    return login


class VaultSecrets:
    """One KV mount. The client library blocks, so each call runs in a thread."""

    def __init__(self, url: str, mount: str, login: VaultLogin, ca: Path | None = None) -> None:
        self._mount = mount
        self._login = login
        self._client = hvac.Client(url=url, token="", verify=str(ca) if ca else True, timeout=VAULT_SECONDS)

    async def read(self, path: str) -> Mapping[str, Secret] | None:
        """The newest version of the secret."""
        where = "/".join(path_words(path))
        try:
            found = await self._do(
                lambda kv: kv.read_secret_version(
                    path=where, mount_point=self._mount, raise_on_deleted_version=True
                )
            )
        except hvac.exceptions.InvalidPath:
            return None
        return {name: Secret(str(value)) for name, value in found["data"]["data"].items()}

    async def write(self, path: str, fields: Mapping[str, Secret]) -> None:
        """A new version of the secret."""
        where = "/".join(path_words(path))
        plain = {name: value.reveal() for name, value in fields.items()}
        await self._do(
            lambda kv: kv.create_or_update_secret(path=where, secret=plain, mount_point=self._mount)
        )

    async def delete(self, path: str) -> None:
        """Every version of the secret."""
        where = "/".join(path_words(path))
        await self._do(lambda kv: kv.delete_metadata_and_all_versions(path=where, mount_point=self._mount))

    async def _do(self, work: Callable[[Any], T]) -> T:
        return await asyncio.to_thread(self._blocking, work)

    def _blocking(self, work: Callable[[Any], T]) -> T:
        try:
            if not self._client.token:
                self._login(self._client)
            try:
                return work(self._client.secrets.kv.v2)
            except hvac.exceptions.Forbidden:
                # Vault answers an expired token like one without rights: a new token decides which it was.
                self._login(self._client)
                return work(self._client.secrets.kv.v2)
        except hvac.exceptions.InvalidPath:
            raise
        except (hvac.exceptions.Forbidden, hvac.exceptions.Unauthorized, hvac.exceptions.InvalidRequest):
            raise Refused("Vault does not let us", nearest_fix="check the policy of the role") from None
        except (hvac.exceptions.VaultError, requests.RequestException) as error:
            # The text of the error may repeat data that was sent.
            raise Retry(f"Vault cannot be asked: {type(error).__name__}", after=VAULT_SECONDS) from None
        except OSError as error:
            raise Refused(
                f"cannot read {error.filename}: {error.strerror}", nearest_fix="let this process read it"
            ) from error
