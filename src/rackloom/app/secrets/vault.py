"""Vault, KV version 2: `nmxm/default/auth` is read from and written to that path of the mount."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import hvac
import hvac.exceptions
import requests

from rackloom.app.secrets.values import Secret, parts
from rackloom.errors import Refused, Retry

T = TypeVar("T")

SECONDS = 10.0
Login = Callable[[hvac.Client], None]


def token_from(file: Path) -> Login:
    """Log in with the token in `file`, which an agent may renew."""

    def login(client: hvac.Client) -> None:
        client.token = file.read_text().strip()

    return login


def kubernetes_role(role: str, token: Path) -> Login:
    """Log in as the pod's service account."""

    def login(client: hvac.Client) -> None:
        client.auth.kubernetes.login(role=role, jwt=token.read_text().strip())

    return login


class VaultSecrets:
    """One KV mount. The client library blocks, so each call has a thread of its own."""

    def __init__(self, url: str, mount: str, login: Login, ca: Path | None = None) -> None:
        self._mount = mount
        self._login = login
        self._client = hvac.Client(url=url, token="", verify=str(ca) if ca else True, timeout=SECONDS)

    async def read(self, path: str) -> Mapping[str, Secret] | None:
        """The newest version of the secret."""
        where = "/".join(parts(path))
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
        where = "/".join(parts(path))
        plain = {name: value.reveal() for name, value in fields.items()}
        await self._do(
            lambda kv: kv.create_or_update_secret(path=where, secret=plain, mount_point=self._mount)
        )

    async def delete(self, path: str) -> None:
        """Every version of the secret."""
        where = "/".join(parts(path))
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
                # A token that has run out is answered like one that may not: a new one decides which it was.
                self._login(self._client)
                return work(self._client.secrets.kv.v2)
        except hvac.exceptions.InvalidPath:
            raise
        except (hvac.exceptions.Forbidden, hvac.exceptions.Unauthorized, hvac.exceptions.InvalidRequest):
            raise Refused("Vault does not let us", nearest_fix="check the policy of the role") from None
        except (hvac.exceptions.VaultError, requests.RequestException) as error:
            # The text of the error may repeat what was sent.
            raise Retry(f"Vault cannot be asked: {type(error).__name__}", after=SECONDS) from None
        except OSError as error:
            raise Refused(
                f"cannot read {error.filename}: {error.strerror}", nearest_fix="let this process read it"
            ) from error
