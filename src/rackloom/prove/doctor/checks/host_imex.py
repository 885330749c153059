"""IMEX on one node: that only pods run it, that there are channels, and what no file tells of its mesh."""

from collections.abc import Collection, Iterator

from rackloom.prove.doctor.checks.view import at_node
from rackloom.prove.doctor.evidence import IMEX_CONFIG, HostSeen
from rackloom.prove.doctor.findings import Finding, fails, holds, unknown
from rackloom.prove.doctor.names import MESH

HOST_IMEX, CHANNELS = "host nvidia-imex off", "IMEX channels offered"


def check_imex(host: HostSeen) -> Iterator[Finding]:
    """All findings about IMEX. Without a driver there are no channels, and without a pod's daemon no mesh."""
    yield _only_pods(host)
    if host.driver_version is not None:
        yield _channels(host)
    if host.imex.in_pods and not host.meshed:
        yield _mesh(host)


def _only_pods(host: HostSeen) -> Finding:
    on, imex = f"node {host.node}", host.imex
    fix = "systemctl disable --now nvidia-imex  # a node holds one IMEX session, which the daemon's pod needs"
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
    on = f"node {host.node}"
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
    daemon = f"nvidia-imex runs in a pod ({_processes(host.imex.in_pods)})"
    return unknown(
        MESH,
        f"node {host.node}",
        f"{daemon}, and which peers it reaches is in no file",
        "rackloom doctor --kubeconfig KUBECONFIG  # the daemons' pods say what they reach",
        evidence=tuple(_told(host)),
        where=(at_node(host.node),),
    )


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
