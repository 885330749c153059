"""IMEX on one node: that only pods run it, that there are channels, and what no file tells of its mesh."""

from collections.abc import Collection, Iterator

from rackloom.prove.doctor.evidence import IMEX_CONFIG, HostSeen
from rackloom.prove.doctor.findings import Finding, fails, holds, unknown
from rackloom.prove.doctor.names import CHANNELS, HOST_IMEX, MESH


def check_imex(host: HostSeen) -> Iterator[Finding]:
    """All findings about IMEX. Without a driver there are no channels, and without a pod's daemon no mesh."""
    yield _only_pods(host)
    if host.driver_version is not None:
        yield _channels(host)
    if host.imex.in_pods:
        yield _mesh(host)


def _only_pods(host: HostSeen) -> Finding:
    on, imex = host.here, host.imex
    fix = "systemctl disable --now nvidia-imex  # a node's one IMEX session is its pod's, but in hostManaged"
    if imex.outside:
        said = f"nvidia-imex runs outside of pods ({_processes(imex.outside)})"
        return fails(HOST_IMEX, on, said, fix, evidence=tuple(_told(host)))
    if imex.enabled:
        return fails(HOST_IMEX, on, "nvidia-imex starts with the host", fix)
    if imex.outside is None or imex.enabled is None:
        said = "processes or units of the host, or their control groups, are not readable"
        return unknown(HOST_IMEX, on, said, "sudo rackloom doctor  # on the host")
    return holds(HOST_IMEX, on, "no nvidia-imex outside of pods")


def _channels(host: HostSeen) -> Finding:
    on = host.here
    fix = "grep Imex /proc/driver/nvidia/params  # ImexChannelCount must not be 0; then load the module again"
    if host.imex.offered is None:
        return unknown(CHANNELS, on, "/proc/devices is not readable", "cat /proc/devices  # on the host")
    if not host.imex.offered:
        return fails(
            CHANNELS, on, "the driver has no devices for IMEX channels: no pod can be given one", fix
        )
    return holds(CHANNELS, on, "the driver has devices for IMEX channels")


def _mesh(host: HostSeen) -> Finding:
    """Files show that a daemon runs, and who is connected; whether memory can be shared it alone knows."""
    daemon, evidence = f"nvidia-imex runs in a pod ({_processes(host.imex.in_pods)})", tuple(_told(host))
    if host.meshed:
        return holds(MESH, host.here, f"{daemon}, and has told which peers it reaches", evidence=evidence)
    said = f"{daemon}, and which peers it reaches is in no file"
    fix = "rackloom doctor --kubeconfig KUBECONFIG  # the daemons' pods say what they reach"
    return unknown(MESH, host.here, said, fix, evidence=evidence)


def _told(host: HostSeen) -> Iterator[str]:
    imex = host.imex
    if imex.connected is not None:
        yield f"host: it is connected with {imex.connected} other addresses at their port of IMEX"
    if imex.outside and imex.named is not None:
        yield f"host: {IMEX_CONFIG} leads to {len(imex.named)} nodes"
    if imex.channels:
        yield f"host: /dev has the devices of {len(imex.channels)} channels, the lowest {imex.channels[0]}"


def _processes(numbers: Collection[int]) -> str:
    return f"process {', '.join(str(one) for one in sorted(numbers))}"
