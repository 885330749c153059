"""`make venv` if an index or a proxy has a certificate from a private authority, as in companies.

The index is a server on loopback that has no packages. The test passes if pip, also the old one that comes
with Python, requests a package. If it does not trust the certificate, it sends no request.
"""

import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.install.commands import ASKED_BY, LIMIT, ROOT

pytestmark = pytest.mark.skipif(
    ASKED_BY not in os.environ, reason=f"NO MAKE VENV: `make test-install` runs it ({ASKED_BY})"
)
OTHERS = ("PIP_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_")
"""Variables of this machine that would decide instead."""


class Index:
    """An index over TLS. `asked` has the paths of requests."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_error(404)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server.socket = context.wrap_socket(
            self.server.socket, server_side=True, do_handshake_on_connect=False
        )


@pytest.fixture
def index(authority: Any, tmp_path: Path) -> Iterator[Index]:
    index = Index(*authority.issue("index").save(tmp_path, "index"))
    thread = threading.Thread(target=index.server.serve_forever)
    thread.start()
    yield index
    index.server.shutdown()
    thread.join()
    index.server.server_close()


def make_venv(folder: Path, index: Index, bundle: Path, configuration: str | None) -> None:
    """Run it in a copy, on a machine with the certificates of `bundle`. It fails, as the index is empty."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    if configuration is not None:
        (folder / "pip.conf").write_text(configuration)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    environment |= {
        "PIP_INDEX_URL": f"https://localhost:{index.server.server_address[1]}/simple",
        # With /dev/null, pip reads no other file either.
        "PIP_CONFIG_FILE": os.devnull if configuration is None else str(folder / "pip.conf"),
        "PIP_RETRIES": "0",
        "NO_PROXY": "localhost",
        "HOME": str(folder),
    }
    command = ["make", "venv", f"SYSTEM_CERTIFICATES={bundle}"]
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, timeout=LIMIT
    )
    assert done.returncode != 0


def test_the_certificates_of_the_system_are_trusted(authority: Any, index: Index, tmp_path: Path) -> None:
    bundle = tmp_path / "system.crt"
    bundle.write_bytes(authority.certificate)
    make_venv(tmp_path, index, bundle, None)
    assert index.asked == ["/simple/uv/"]


def test_a_bundle_that_pip_is_configured_with_stays(
    authority: Any, make_authority: Any, index: Index, tmp_path: Path
) -> None:
    """A configured bundle may have an authority that the system does not know."""
    system, own = tmp_path / "system.crt", tmp_path / "own.crt"
    system.write_bytes(make_authority("another").certificate)
    own.write_bytes(authority.certificate)
    make_venv(tmp_path, index, system, f"[global]\ncert = {own}\n")
    assert index.asked == ["/simple/uv/"]
