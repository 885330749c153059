"""Signing in to the map at a real OpenID provider: `oidc-provider`, which is certified, on Node.

npm fetches it by its pinned digests (`oidc_provider/package-lock.json`). Without Node, npm or packages the
test is skipped with the reason.
"""

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.app.test_map_sign_in import signing_in_at
from tests.cluster.processes import start
from tests.ports import reserved_ports
from tests.waiting import until_seen

HERE = Path(__file__).parent / "oidc_provider"
INSTALLING = 180
SECRET = "a secret & more"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the provider's program, with its packages."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("NO NODE: nobody signs in at a real OpenID provider")
    folder = tmp_path_factory.mktemp("provider") / "program"
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALLING)
    if done.returncode != 0:
        pytest.skip(f"NO PACKAGES FOR A REAL OPENID PROVIDER: {done.stderr[-300:]}")
    return folder


@pytest.mark.slow
def test_a_person_signs_in_at_a_certified_provider(ground: Any, authority: Any, program: Path) -> None:
    secret = ground.directory / "client-secret"
    secret.write_text(SECRET)
    certificate, key = authority.issue("provider").save(ground.directory, "provider")

    async def scenario(port: int, map_port: int) -> None:
        address = f"https://localhost:{map_port}"
        words = [port, certificate, key, f"{address}/map/login/back", secret]
        child = start("provider", ["node", str(program / "server.mjs"), *map(str, words)], ground.directory)
        try:
            await asyncio.to_thread(until_seen, lambda: "ready" in child.tail(), "the provider is ready", 60)
            sign_in = f'token = "id_token"\nclient_secret_file = "{secret}"'
            lines = 'audiences = ["rack-map"]\norganisations = ["acme"]'
            async with signing_in_at(
                ground, f"https://localhost:{port}", map_port, sign_in=sign_in, issuer_lines=lines
            ) as browser:
                page = await browser.sign_in()
                assert (page.status_code, str(page.url)) == (200, f"{address}/"), page.text[-2000:]
                assert "rackloom-map" in browser.http.cookies
        finally:
            child.stop()

    with reserved_ports(2) as first:
        asyncio.run(asyncio.wait_for(scenario(first, first + 1), 180))
