"""Checks of one host's own files, as far as IMEX and DRA need them: driver, CDI, ports, IMEX itself.

- `DRIVER`: NVIDIA's kernel module is loaded and not older than `OLDEST_DRIVER`.
- `CDI`: the container runtime has the Container Device Interface on, by containerd's configuration, or else
  by the default of the runtime's version (containerd 2.0, CRI-O 1.23).
- `PORTS`: nothing on the host itself listens on the ports of IMEX.
- `HOST_IMEX`: nvidia-imex runs in pods only. One that the host starts takes the node's single IMEX session.
- `CHANNELS`: the loaded driver offers device numbers for IMEX channels.
- `MESH`: only if a pod's daemon runs. Files show connections, but only the daemon knows the peers that it
  reaches.

A fact that could not be read is unknown. Findings that hold are returned too: they count as evidence beside
the cluster's.
"""

from collections.abc import Collection, Iterator

import msgspec

from rackloom.core.cluster.names import (
    IMEX_COMMAND_PORT,
    IMEX_SERVER_PORT,
    OLDEST_IMEX_DRIVER,
    is_driver_too_old,
    version_numbers,
)
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.evidence import IMEX_CONFIG_FILE, CdiSetting, HostEvidence
from rackloom.core.diagnosis.findings import Finding, fails, holds, unknown

_AS_ROOT = "sudo rackloom doctor  # on the host"

# IMEX on the host.


def check_host_imex(host: HostEvidence) -> Iterator[Finding]:
    """All findings about IMEX. Without a driver there are no channels, and without a pod's daemon no mesh."""
    yield _imex_in_pods_only(host)
    if host.driver_version is not None:
        yield _channels(host)
    if host.imex.in_pods:
        yield _imex_mesh(host)


def _imex_in_pods_only(host: HostEvidence) -> Finding:
    on, imex = host.here, host.imex
    fix = "systemctl disable --now nvidia-imex  # a node's one IMEX session is its pod's, but in hostManaged"
    if imex.outside:
        message = f"nvidia-imex runs outside of pods ({_process_list(imex.outside)})"
        return fails(Check.HOST_IMEX, on, message, fix, evidence=tuple(_imex_evidence(host)))
    if imex.enabled:
        return fails(Check.HOST_IMEX, on, "nvidia-imex starts with the host", fix)
    if imex.outside is None or imex.enabled is None:
        message = "processes or units of the host, or their control groups, are not readable"
        return unknown(Check.HOST_IMEX, on, message, _AS_ROOT)
    return holds(Check.HOST_IMEX, on, "no nvidia-imex outside of pods")


def _channels(host: HostEvidence) -> Finding:
    on = host.here
    fix = "grep Imex /proc/driver/nvidia/params  # ImexChannelCount must not be 0; then load the module again"
    if host.imex.offered is None:
        return unknown(
            Check.CHANNELS, on, "/proc/devices is not readable", "cat /proc/devices  # on the host"
        )
    if not host.imex.offered:
        message = "the driver has no devices for IMEX channels: no pod can be given one"
        return fails(Check.CHANNELS, on, message, fix)
    return holds(Check.CHANNELS, on, "the driver has devices for IMEX channels")


def _imex_mesh(host: HostEvidence) -> Finding:
    """Files show daemons and connections, but only a daemon knows whether its mesh is complete."""
    daemon = f"nvidia-imex runs in a pod ({_process_list(host.imex.in_pods)})"
    evidence = tuple(_imex_evidence(host))
    if host.meshed:
        return holds(
            Check.MESH, host.here, f"{daemon}, and has told which peers it reaches", evidence=evidence
        )
    message = f"{daemon}, and which peers it reaches is in no file"
    fix = "rackloom doctor --kubeconfig KUBECONFIG  # the daemons' pods say what they reach"
    return unknown(Check.MESH, host.here, message, fix, evidence=evidence)


def _imex_evidence(host: HostEvidence) -> Iterator[str]:
    imex = host.imex
    if imex.connected is not None:
        yield f"host: it is connected with {imex.connected} other addresses at their port of IMEX"
    if imex.outside and imex.named is not None:
        yield f"host: {IMEX_CONFIG_FILE} leads to {len(imex.named)} nodes"
    if imex.channels:
        yield f"host: /dev has the devices of {len(imex.channels)} channels, the lowest {imex.channels[0]}"


def _process_list(numbers: Collection[int]) -> str:
    return f"process {', '.join(str(number) for number in sorted(numbers))}"


# Driver, container runtime and ports.


_CDI_BY_DEFAULT = {"containerd": (2, 0), "cri-o": (1, 23)}
"""The first version of a runtime that has CDI on unless its configuration turns it off (CDI README)."""
_ENABLE_CDI_CONTAINERD = (
    "systemctl restart containerd  # after enable_cdi = true for the CRI plugin in its config.toml"
)
_ENABLE_CDI_IN_K3S = (
    "systemctl restart k3s  # or k3s-agent, rke2-server, rke2-agent; "
    "after enable_cdi = true for the CRI plugin in its config.toml.tmpl"
)
_UPDATE_CRIO = "systemctl restart crio  # after an update to CRI-O 1.23 or later"


def check_host(host: HostEvidence) -> tuple[Finding, ...]:
    """All findings about a host."""
    found = (_driver(host), _cdi(host), _ports(host), *check_host_imex(host))
    return tuple(msgspec.structs.replace(finding, where=(host.here,)) for finding in found)


def _driver(host: HostEvidence) -> Finding:
    found = host.driver_version
    fix = f"cat /proc/driver/nvidia/version  # install NVIDIA's driver {OLDEST_IMEX_DRIVER} or later"
    if found is None:
        message = "no NVIDIA kernel module is loaded, or its version is not readable"
        return unknown(Check.DRIVER, host.here, message, fix)
    if is_driver_too_old(found):
        return fails(Check.DRIVER, host.here, f"driver {found} is older than {OLDEST_IMEX_DRIVER}", fix)
    return holds(Check.DRIVER, host.here, f"driver {found}")


def _cdi(host: HostEvidence) -> Finding:
    """By containerd's configuration, else by the default of the runtime's version."""
    name, _, version = (host.runtime or "containerd").partition("://")
    since = _CDI_BY_DEFAULT.get(name)
    if name == "containerd" and host.cdi_setting is not CdiSetting.UNSAID:
        return _cdi_configured(host)
    if host.runtime is None:
        return _runtime_unknown(host, "which container runtime it has is not known")
    if since is None or not version_numbers(version):
        return _runtime_unknown(host, f"whether {host.runtime} has CDI on is not known here")
    if version_numbers(version) < since:
        message = f"{host.runtime} has CDI off unless it is configured"
        return fails(Check.CDI, host.here, message, _enable_cdi_command(host))
    return holds(Check.CDI, host.here, f"{host.runtime} has it on by default")


def _cdi_configured(host: HostEvidence) -> Finding:
    if host.cdi_setting is CdiSetting.ON:
        return holds(Check.CDI, host.here, "switched on by the container runtime's configuration")
    if host.cdi_setting is CdiSetting.OFF:
        message = "the container runtime's configuration switches CDI off"
        return fails(Check.CDI, host.here, message, _enable_cdi_command(host))
    message = "containerd's configuration, or a file that it imports, cannot be read or understood"
    return unknown(Check.CDI, host.here, message, "containerd config dump  # on the host: says what is wrong")


def _enable_cdi_command(host: HostEvidence) -> str:
    """K3s and RKE2 bundle a containerd, with versions such as 1.7.20-k3s1."""
    runtime = host.runtime or ""
    if runtime.startswith("cri-o"):
        return _UPDATE_CRIO
    return _ENABLE_CDI_IN_K3S if "-k3s" in runtime else _ENABLE_CDI_CONTAINERD


def _runtime_unknown(host: HostEvidence, message: str) -> Finding:
    return unknown(Check.CDI, host.here, message, "kubectl get nodes -o wide  # shows the runtime of each")


def _ports(host: HostEvidence) -> Finding:
    if host.busy_ports is None:
        return unknown(Check.PORTS, host.here, "sockets are not readable", _AS_ROOT)
    taken = sorted({IMEX_SERVER_PORT, IMEX_COMMAND_PORT} & host.busy_ports)
    if taken:
        which = " and ".join(str(port) for port in taken)
        listening = " or ".join(f"sport = :{port}" for port in taken)
        fix = f"ss -ltnp '{listening}'  # stop what listens there"
        return fails(Check.PORTS, host.here, f"something on the host listens on port {which}", fix)
    return holds(Check.PORTS, host.here, f"nobody listens on {IMEX_SERVER_PORT} and {IMEX_COMMAND_PORT}")
