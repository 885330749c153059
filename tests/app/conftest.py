"""A complete configuration, over simulated switch controllers that require certificates."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.waiting import PATIENCE

from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.lab.switches.servers import NmxcServer, NmxcServerTls
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

ORG = "acme"


class Ground:
    """Files of a site: certificates, key set, configuration."""

    def __init__(self, directory: Path, authority: Any) -> None:
        self.directory = directory
        self.authority = authority
        self.ca = directory / "ca.crt"
        self.ca.write_bytes(authority.certificate)
        self.files = {
            name: authority.issue(name).save(directory, name)
            for name in ("server", "admin", "viewer", "site")
        }
        self._key = Ed25519PrivateKey.generate()
        self.jwks = directory / "jwks.json"
        public = json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(self._key.public_key()))
        self.jwks.write_text(json.dumps({"keys": [public | {"kid": "one", "use": "sig"}]}))

    def token(self, org: str = ORG, role: str = "TENANT_ADMIN", issuer: str = "https://issuer.test") -> str:
        claims = {"iss": issuer, "aud": "rackloom", "sub": "somebody", "exp": time.time() + 600}
        claims["orgs"] = {org: [role]}
        return jwt.encode(claims, self._key, algorithm="EdDSA", headers={"kid": "one"})

    def config(self, **changes: str) -> Path:
        """A configuration file. `changes` are lines to add to a section."""
        crt, key = self.files["server"]
        site_crt, site_key = self.files["site"]
        sections = {
            "site": f'name = "lab"\nprovider_org = "{ORG}"',
            "database": f'sqlite = "{self.directory / "home"}"',
            "nvlink_config": "enabled = true\nallow_insecure = false\nmonitor_run_interval = '30s'\n"
            f'nmx_c_tls_ca_cert_path = "{self.ca}"\n'
            f'nmx_c_tls_client_cert_path = "{site_crt}"\nnmx_c_tls_client_key_path = "{site_key}"',
            "server": f'listen = "127.0.0.1:0"\ntls_cert = "{crt}"\ntls_key = "{key}"',
            "auth": "auto_tenant = true",
            "admin": f'listen = "127.0.0.1:0"\ntls_cert = "{crt}"\ntls_key = "{key}"\n'
            f'client_ca = "{self.ca}"\nadmin_names = ["admin"]\nreader_names = ["viewer"]',
            "metrics": 'listen = "127.0.0.1:0"',
            "secrets": f'provider = "file"\ndirectory = "{self.directory / "secrets"}"',
        }
        text = "\n".join(f"[{name}]\n{body}\n{changes.pop(name, '')}" for name, body in sections.items())
        text += (
            '\n[[auth.issuers]]\nissuer = "https://issuer.test"\naudience = "rackloom"\n'
            f'jwks_file = "{self.jwks}"\nalgorithms = ["EdDSA"]\norganisations = ["*"]\n'
        )
        text += "\n".join(f"[{name}]\n{body}" for name, body in changes.items())
        file = self.directory / "site.toml"
        file.write_text(text)
        return file

    def rest(self, port: int, org: str = ORG, role: str = "TENANT_ADMIN") -> httpx2.AsyncClient:
        import ssl

        return httpx2.AsyncClient(
            base_url=f"https://localhost:{port}/v2/org/{org}/nico/",
            headers={"Authorization": f"Bearer {self.token(org, role)}"},
            verify=ssl.create_default_context(cafile=str(self.ca)),
            timeout=PATIENCE,
        )

    @asynccontextmanager
    async def racks(self, count: int = 1, *, tls: bool = True) -> AsyncIterator[list[NmxcServer]]:
        """Simulated racks with controllers that require a certificate of the authority."""
        site = build_site(profiles.load_rack("gb200-nvl72"), count, SeededNames("lab"))
        pem = self.authority.issue("switch")
        material = NmxcServerTls(
            certificate=pem.certificate, key=pem.key, client_ca=self.authority.certificate
        )
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(NmxcServer(fabric, tls=material if tls else None))
                for fabric in fabrics_of(site, "lab")
            ]


@pytest.fixture
def ground(tmp_path: Path, authority: Any) -> Ground:
    return Ground(tmp_path, authority)
