"""What the kubelet plugins of `rackloom node` are told in the same way."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from rackloom.app.node import NodeOptions


def env(name: str) -> Parameter:
    """A flag that an environment variable may set."""
    return Parameter(env_var=name)


def listed(names: str) -> tuple[str, ...]:
    """Names that one variable gives with commas between."""
    return tuple(name.strip() for name in names.split(",") if name.strip())


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Driver:
    """Where NVIDIA's driver is."""

    driver_root: Annotated[Path, env("DRIVER_ROOT_CTR_PATH")] = Path("/driver-root")
    "Where NVIDIA's driver is seen from here."
    host_driver_root: Annotated[Path, env("NVIDIA_DRIVER_ROOT")] = Path("/")
    "Where the host has NVIDIA's driver."
    proc_devices: Annotated[Path | None, env("ALT_PROC_DEVICES_PATH")] = None
    "A file to read instead of /proc/devices."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """One plugin on one node, between kubelet and the API server."""

    node: Annotated[str, env("NODE_NAME")]
    "Name of this node."
    sysroot: Path = Path("/")
    "Where the host's /proc and /sys are found."
    registry: Annotated[Path, env("KUBELET_REGISTRAR_DIRECTORY_PATH")] = Path(
        "/var/lib/kubelet/plugins_registry"
    )
    "kubelet's plugins_registry directory."
    plugins: Annotated[Path, env("KUBELET_PLUGINS_DIRECTORY_PATH")] = Path("/var/lib/kubelet/plugins")
    "kubelet's plugins directory."
    cdi_root: Annotated[Path, env("CDI_ROOT")] = Path("/var/run/cdi")
    "Where the container runtime reads CDI specs."
    listen: Annotated[str | None, env("HTTP_ENDPOINT")] = None
    "HOST:PORT of /metrics, /healthz and /readyz."
    healthcheck_port: Annotated[int, env("HEALTHCHECK_PORT")] = -1
    "TCP port of the gRPC health service that kubelet probes; -1 for none."
    kubeconfig: Path | None = None
    "How to reach the API server; default: as the service account of this pod."

    def options(self) -> "NodeOptions":
        """The same, for the process."""
        from rackloom.app.node import NodeOptions
        from rackloom.claim.node.run import Places

        return NodeOptions(
            node=self.node,
            places=Places(registry=self.registry, plugins=self.plugins, cdi=self.cdi_root),
            sysroot=self.sysroot,
            listen=self.listen,
            health_listen=None if self.healthcheck_port < 0 else f"[::]:{self.healthcheck_port}",
            kubeconfig=self.kubeconfig,
        )
