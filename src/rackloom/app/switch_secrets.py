"""TLS material and credentials of switch controllers, read where the site keeps them.

The files of `[nvlink_config]` are for every controller. One that needs its own has a secret
`nmxc/<chassis serial>/tls` or `nmxm/<chassis serial>/tls`, whose fields `ca`, `certificate`, `key` and
`authority` take their place. NMX-M takes a name and a password: `nmxm/<chassis serial>/auth`, or
`nmxm/default/auth` for every one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rackloom.app.config_sections import NvlinkConfig
from rackloom.app.secrets.values import Secret, SecretProvider
from rackloom.carve.admin.credentials import NMX_M
from rackloom.carve.fabric.nmxm.session import Login
from rackloom.carve.fabric.ports import FabricUnavailable
from rackloom.carve.fabric.tls import TlsMaterial
from rackloom.carve.site.controllers import ControllerKind
from rackloom.errors import Refused, Retry

FAMILY = {ControllerKind.NMX_C: "nmxc", ControllerKind.NMX_M: "nmxm"}


class SwitchSecrets:
    """Reads afresh at every call."""

    def __init__(self, config: NvlinkConfig, secrets: SecretProvider) -> None:
        self._config = config
        self._secrets = secrets

    async def tls(self, kind: ControllerKind, serials: Sequence[str]) -> TlsMaterial:
        """What to use towards the controller of these chassis.

        Raises Refused and Retry as the provider does, OSError where a file cannot be read.
        """
        own: dict[str, Secret] = {}
        for serial in serials:
            own |= await self._secrets.read(f"{FAMILY[kind]}/{serial}/tls") or {}
        if own:
            return TlsMaterial(
                ca=_bytes(own.get("ca")),
                certificate=_bytes(own.get("certificate")),
                key=_bytes(own.get("key")),
                authority=own["authority"].reveal() if "authority" in own else None,
            )
        return await asyncio.to_thread(self._common)

    async def login(self, serials: Sequence[str]) -> Login:
        """Name and password for the NMX-M of these chassis. Raises FabricUnavailable without any."""
        try:
            for path in (*(f"nmxm/{serial}/auth" for serial in serials), NMX_M):
                if fields := await self._secrets.read(path):
                    return _login(path, fields)
        except (Refused, Retry) as error:
            raise FabricUnavailable(error.reason) from error
        raise FabricUnavailable(f"no secret {NMX_M}: keep it with rackloom admin credential add nmx-m")

    def _common(self) -> TlsMaterial:
        config = self._config
        return TlsMaterial(
            ca=_content(config.nmx_c_tls_ca_cert_path),
            certificate=_content(config.nmx_c_tls_client_cert_path),
            key=_content(config.nmx_c_tls_client_key_path),
            authority=config.nmx_c_tls_authority,
        )


def _login(path: str, fields: Mapping[str, Secret]) -> Login:
    if not {"username", "password"} <= fields.keys():
        raise FabricUnavailable(f"secret {path} must have the fields username and password")
    return Login(fields["username"].reveal(), fields["password"].reveal())


def _bytes(secret: Secret | None) -> bytes | None:
    return None if secret is None else secret.reveal().encode()


def _content(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
