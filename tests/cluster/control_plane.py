"""A real control plane: etcd, kube-apiserver, kube-scheduler and kube-controller-manager.

By default it serves on loopback, for simulated nodes. With a separate address it serves real nodes
(tests/node): it can be reached through the Service `kubernetes`, calls kubelets, and calls webhooks at the
addresses of their pods.
"""

import json
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx2
from tests.cluster.credentials import MASTERS, Credentials
from tests.cluster.processes import Child, start
from tests.ports import reserved_ports

from rackloom.core.cluster.objects import Object

_READY_WITHIN = 300.0
"""Seconds for the API server to be ready. An idle machine needs about five."""
_ISSUER = "https://kubernetes.default.svc"
_SERVICES = "10.96.0.0/16"
_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
_SERVICE = "10.96.0.1"
"""The address of the Service `kubernetes`."""
_TOWARDS_NOBODY = ["--endpoint-reconciler-type=none"]
"""An endpoint on loopback is not valid, and nothing reaches such a server through a Service."""
_PER_SECOND = 2000
"""Calls that the scheduler and the controllers may make: their own limits are meant for larger machines."""


class NotReady(Exception):
    """It did not come up. The message has the ends of the logs."""


class ControlPlane:
    """Four processes in one folder. Every one of them can be killed and started again."""

    def __init__(self, binaries: Path, folder: Path, *, address: str = "", port: int = 0) -> None:
        self._binaries = binaries
        self._folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.credentials = Credentials(folder)
        self._reserved = ExitStack()
        self._serves_nodes = bool(address)
        self._address = address or "127.0.0.1"
        self._port = port or self._reserved.enter_context(reserved_ports())
        self.url = f"https://{self._address}:{self._port}"
        self.admin = self.kubeconfig("admin", MASTERS)
        self._children: dict[str, Child] = {}

    def kubeconfig(self, user: str, *groups: str) -> Path:
        """A client configuration for a user of these groups, by certificate."""
        return self.credentials.kubeconfig(self.url, user, *groups)

    def kubeconfig_of_token(self, name: str, token: str) -> Path:
        """A client configuration for the owner of this bearer token."""
        return self.credentials.kubeconfig_of_token(self.url, name, token)

    def start(self) -> None:
        """Start all of it and wait until the API server serves.

        Raises:
            NotReady: it ended, or did not become ready in time.
        """
        for name in ("etcd", "kube-apiserver"):
            self.start_one(name)
        self.wait_until_ready()
        for name in ("kube-scheduler", "kube-controller-manager"):
            self.start_one(name)

    def start_one(self, name: str) -> None:
        """Start one of the four, for the first time or after `kill_one`."""
        flags = {
            "etcd": self._etcd,
            "kube-apiserver": self._apiserver,
            "kube-scheduler": self._scheduler,
            "kube-controller-manager": self._controller_manager,
        }
        self._children[name] = start(name, [self._binaries / name, *flags[name]()], self.logs)

    def kill_one(self, name: str) -> None:
        """Kill one of the four without a warning."""
        self._children[name].kill()

    def wait_until_ready(self) -> None:
        """Wait until the API server reports that it is ready.

        Raises:
            NotReady: it ended, or did not become ready in time.
        """
        with self._client() as client:
            self._wait(lambda: _is_ready(client))

    def bound_token(self, pod: Object, account: str) -> str:
        """A service account token that is valid while the pod exists, as a kubelet requests."""
        meta = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        where = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token"
        with self._client() as client:
            answer = client.post(where, json={"spec": {"boundObjectRef": bound}}).raise_for_status()
        token: str = answer.json()["status"]["token"]
        return token

    def _client(self) -> httpx2.Client:
        trust = ssl.create_default_context(cafile=str(self.credentials.authority))
        admin = self.credentials.client("admin", MASTERS)
        trust.load_cert_chain(admin.certificate, admin.key)
        return httpx2.Client(base_url=self.url, verify=trust, timeout=60)

    def stop(self) -> None:
        """End the running programs, the last started first."""
        while self._children:
            self._children.popitem()[1].stop()
        self._reserved.close()

    def log_tails(self) -> str:
        """The ends of all logs."""
        return "\n".join(child.tail() for child in self._children.values())

    def _wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _READY_WITHIN
        while not ready():
            ended = [child.name for child in self._children.values() if child.ended()]
            if ended or time.monotonic() > deadline:
                why = f"{' and '.join(ended)} ended" if ended else f"not ready within {_READY_WITHIN:.0f} s"
                raise NotReady(f"{why}\n{self.log_tails()}")
            time.sleep(0.1)

    @property
    def _store(self) -> str:
        return f"unix://{self._folder}/etcd.sock"

    def _etcd(self) -> list[str]:
        return [
            f"--data-dir={self._folder}/etcd",
            f"--listen-client-urls={self._store}",
            # The flags must name addresses to advertise, but a single member gets no calls at either.
            "--advertise-client-urls=http://localhost:2379",
            f"--listen-peer-urls=unix://{self._folder}/peer.sock",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _apiserver(self) -> list[str]:
        names = (*_NAMES, _SERVICE, self._address)
        serving = self.credentials.server("kube-apiserver", *names)
        signing = self.credentials.service_accounts
        return [
            f"--etcd-servers={self._store}",
            f"--bind-address={self._address}",
            f"--secure-port={self._port}",
            *(self._towards_nodes() if self._serves_nodes else _TOWARDS_NOBODY),
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.credentials.authority}",
            "--anonymous-auth=false",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--service-account-issuer={_ISSUER}",
            f"--service-account-key-file={signing.certificate}",
            f"--service-account-signing-key-file={signing.key}",
            f"--service-cluster-ip-range={_SERVICES}",
            "--profiling=false",
        ]

    def _towards_nodes(self) -> list[str]:
        caller = self.credentials.client("kube-apiserver-kubelet-client", MASTERS)
        return [
            f"--advertise-address={self._address}",
            f"--kubelet-client-certificate={caller.certificate}",
            f"--kubelet-client-key={caller.key}",
            "--kubelet-preferred-address-types=InternalIP",
            # Webhooks are called at the addresses of their pods: the server's own network has no kube-proxy.
            "--enable-aggregator-routing=true",
        ]

    def _scheduler(self) -> list[str]:
        file = self._folder / "scheduler.json"
        connection = {
            "kubeconfig": str(self.kubeconfig("system:kube-scheduler")),
            "qps": _PER_SECOND,
            "burst": _PER_SECOND,
        }
        document = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": connection,
            "leaderElection": {"leaderElect": False},
        }
        file.write_text(json.dumps(document))
        return [f"--config={file}", "--secure-port=0"]

    def _controller_manager(self) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig('system:kube-controller-manager')}",
            f"--kube-api-qps={_PER_SECOND}",
            f"--kube-api-burst={_PER_SECOND}",
            "--leader-elect=false",
            "--secure-port=0",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self.credentials.service_accounts.key}",
            f"--root-ca-file={self.credentials.authority}",
        ]


def _is_ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/readyz").status_code == httpx2.codes.OK
    except httpx2.TransportError:
        return False
