"""Secret providers: one contract for all of them, and none of them discloses a secret."""

import asyncio
import base64
import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from rackloom.app.site.secret_stores import (
    KubernetesSecrets,
    VaultSecrets,
    login_with_service_account,
    login_with_token,
)
from rackloom.app.site.secrets import EnvironmentSecrets, FileSecrets, Secret, variable_prefix
from rackloom.errors import Refused, Retry

PATH = "nmxm/default/auth"
FIELDS = {"username": Secret("root"), "password": Secret("hush ä")}


class FakeVault(ThreadingHTTPServer):
    """A fake of Vault: KV version 2 and the Kubernetes login, as far as the provider uses them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), VaultHandler)
        self.data = {}
        self.tokens = {"good"}
        self.roles = {("rackloom", "pod-token")}
        self.logins = 0
        self.broken = False
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class VaultHandler(BaseHTTPRequestHandler):
    server: FakeVault

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = self._path("data")
        if path in self.server.data:
            self._reply(200, {"data": {"data": self.server.data[path], "metadata": {"version": 1}}})
        elif path is not None:
            self._reply(404, {"errors": []})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/auth/kubernetes/login":
            self._login(body)
        elif path := self._path("data"):
            self.server.data[path] = body["data"]
            self._reply(200, {"data": {"version": 1}})

    do_PUT = do_POST  # noqa: N815 - the name is the base class's

    def do_DELETE(self):
        if path := self._path("metadata"):
            self.server.data.pop(path, None)
            self._reply(204, None)

    def _login(self, body):
        if (body["role"], body["jwt"]) not in self.server.roles:
            self._reply(403, {"errors": ["permission denied"]})
            return
        self.server.logins += 1
        self.server.tokens = {f"login-{self.server.logins}"}
        self._reply(200, {"auth": {"client_token": f"login-{self.server.logins}"}})

    def _path(self, kind):
        if self.server.broken:
            self._reply(503, {"errors": ["sealed"]})
        elif self.headers.get("X-Vault-Token") not in self.server.tokens:
            self._reply(403, {"errors": ["permission denied"]})
        else:
            return self.path.removeprefix(f"/v1/secret/{kind}/")
        return None

    def _reply(self, status, body):
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def vault():
    with FakeVault() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class FakeCluster(httpx2.AsyncBaseTransport):
    """A fake of the API server's Secrets."""

    def __init__(self):
        self.secrets = {}
        self.status = None

    async def handle_async_request(self, request):
        assert request.headers["Authorization"] == "Bearer pod-token"
        name = request.url.path.removeprefix("/api/v1/namespaces/site/secrets").strip("/")
        if self.status is not None:
            return httpx2.Response(self.status, json={"message": "hush"})
        if request.method == "POST":
            body = json.loads(await request.aread())
            self.secrets[body["metadata"]["name"]] = body
            return httpx2.Response(201, json=body)
        if name not in self.secrets:
            return httpx2.Response(404, json={})
        if request.method == "PUT":
            self.secrets[name] = json.loads(await request.aread())
        found = self.secrets.pop(name) if request.method == "DELETE" else self.secrets[name]
        return httpx2.Response(200, json=found)


@pytest.fixture
def account(tmp_path):
    (tmp_path / "token").write_text("pod-token\n")
    return tmp_path


@pytest.fixture(params=["file", "kubernetes", "vault"])
def provider(request, tmp_path, account, vault):
    if request.param == "file":
        return FileSecrets(tmp_path / "secrets")
    if request.param == "kubernetes":
        return KubernetesSecrets("https://cluster", "site", account, FakeCluster())
    (tmp_path / "vault-token").write_text("good\n")
    return VaultSecrets(vault.url, "secret", login_with_token(tmp_path / "vault-token"))


def test_what_is_written_is_read_replaced_and_forgotten(provider):
    async def scenario():
        assert await provider.read(PATH) is None
        await provider.write(PATH, FIELDS)
        assert await provider.read(PATH) == FIELDS
        await provider.write(PATH, {"password": Secret("new")})
        assert await provider.read(PATH) == {"password": Secret("new")}
        await provider.delete(PATH)
        assert await provider.read(PATH) is None
        await provider.delete(PATH)

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["", "..", "a/../b", "/etc/passwd", "a//b", "a b", "a/.b", "a\nb"])
def test_a_path_means_one_place(provider, path):
    for work in (provider.read(path), provider.delete(path), provider.write(path, FIELDS)):
        with pytest.raises(Refused, match="cannot name a secret"):
            asyncio.run(work)


def test_the_environment_is_read_only():
    texts = {
        f"{variable_prefix(PATH)}USERNAME": "root",
        f"{variable_prefix(PATH)}PASSWORD": "hush",
        "HOME": "/",
    }
    provider = EnvironmentSecrets(texts)

    async def scenario():
        assert await provider.read(PATH) == {"username": Secret("root"), "password": Secret("hush")}
        assert await provider.read("nmxm/other/auth") is None
        for work in (provider.write(PATH, FIELDS), provider.delete(PATH)):
            with pytest.raises(Refused, match="read only"):
                await work

    asyncio.run(scenario())


def test_a_mounted_kubernetes_secret_is_a_directory(tmp_path):
    """The kubelet swaps a hidden directory and links the fields into the visible one."""
    data = tmp_path / "nmxm" / "default" / "auth"
    hidden = data / "..2026_01_01"
    hidden.mkdir(parents=True)
    (hidden / "password").write_text("hush\n")
    (hidden / "password").chmod(0o440)
    (data / "..data").symlink_to(hidden)
    (data / "password").symlink_to("..data/password")
    assert asyncio.run(FileSecrets(tmp_path).read(PATH)) == {"password": Secret("hush")}


def test_a_file_that_everybody_may_read_is_no_secret(tmp_path):
    place = tmp_path / "nmxm" / "default" / "auth"
    place.mkdir(parents=True)
    (place / "password").write_text("hush")
    (place / "password").chmod(0o644)
    with pytest.raises(Refused, match="everybody"):
        asyncio.run(FileSecrets(tmp_path).read(PATH))


def test_vault_logs_in_again_when_its_token_has_run_out(vault, account):
    provider = VaultSecrets(vault.url, "secret", login_with_service_account("rackloom", account / "token"))

    async def scenario():
        await provider.write(PATH, FIELDS)
        vault.tokens = set()
        assert await provider.read(PATH) == FIELDS
        assert vault.logins == 2
        vault.roles = set()
        vault.tokens = set()
        with pytest.raises(Refused, match="does not let us"):
            await provider.read(PATH)

    asyncio.run(scenario())


def test_a_sealed_vault_is_tried_again_later(vault, account):
    vault.broken = True
    with pytest.raises(Retry, match="cannot be asked") as trouble:
        asyncio.run(
            VaultSecrets(vault.url, "secret", login_with_token(account / "token")).write(PATH, FIELDS)
        )
    assert "hush" not in str(trouble.value)
    assert trouble.value.__cause__ is None


@pytest.mark.parametrize(("status", "error"), [(403, Refused), (401, Refused), (503, Retry)])
def test_the_answer_of_a_refusing_cluster_is_not_repeated(account, status, error):
    cluster = FakeCluster()
    cluster.status = status
    provider = KubernetesSecrets("https://cluster", "site", account, cluster)
    with pytest.raises(error) as trouble:
        asyncio.run(provider.read(PATH))
    assert "hush" not in str(trouble.value)


def test_what_kubernetes_keeps_is_base64(account):
    cluster = FakeCluster()
    asyncio.run(KubernetesSecrets("https://cluster/", "site", account, cluster).write(PATH, FIELDS))
    (kept,) = cluster.secrets.values()
    assert kept["metadata"]["name"] == "rackloom-nmxm-default-auth"
    assert base64.b64decode(kept["data"]["password"]).decode() == "hush ä"


def test_a_secret_does_not_tell_itself():
    secret = Secret("hush")
    for shown in (str(secret), repr(secret), f"{secret}", f"{secret!r:>20}", f"{[secret]}", f"{FIELDS}"):
        assert "hush" not in shown
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert secret.reveal() == "hush"


def test_files_are_for_their_owner_only(tmp_path):
    asyncio.run(FileSecrets(tmp_path / "secrets").write(PATH, FIELDS))
    kept = tmp_path / "secrets" / PATH / "password"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert Path(kept.parent).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kept_in", ["file", "kubernetes"])
def test_a_secret_that_is_no_text_is_refused_and_not_told(tmp_path, account, kept_in):
    der = b"\x30\x82hush\xff"
    if kept_in == "file":
        field = tmp_path / "secrets" / PATH / "key"
        field.parent.mkdir(parents=True)
        field.write_bytes(der)
        field.chmod(0o600)
        provider = FileSecrets(tmp_path / "secrets")
    else:
        cluster = FakeCluster()
        cluster.secrets["rackloom-nmxm-default-auth"] = {"data": {"key": base64.b64encode(der).decode()}}
        provider = KubernetesSecrets("https://cluster", "site", account, cluster)
    with pytest.raises(Refused, match=r"key is not text .*as PEM") as trouble:
        asyncio.run(provider.read(PATH))
    assert "hush" not in str(trouble.value)
    assert trouble.value.__cause__ is None
