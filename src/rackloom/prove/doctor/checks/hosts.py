"""One node, as far as IMEX needs it: driver, CDI, IMEX itself, and nobody else where the daemon is to be."""

import msgspec

from rackloom.claim.domain.driver import OLDEST_DRIVER, is_too_old, numbers
from rackloom.claim.domain.names import IMEX_COMMAND_PORT, IMEX_SERVER_PORT
from rackloom.prove.doctor.checks.host_imex import check_imex
from rackloom.prove.doctor.evidence import CdiSetting, HostSeen
from rackloom.prove.doctor.findings import Finding, fails, holds, unknown
from rackloom.prove.doctor.names import CDI, DRIVER, PORTS

_CDI_BY_DEFAULT = {"containerd": (2, 0), "cri-o": (1, 23)}
"""From which version a runtime has CDI on unless its configuration says otherwise (CDI README)."""
_ENABLE_CDI = "systemctl restart containerd  # after enable_cdi = true for the CRI plugin in its config.toml"
_ENABLE_CDI_IN_K3S = (
    "systemctl restart k3s  # or k3s-agent, rke2-server, rke2-agent; "
    "after enable_cdi = true for the CRI plugin in its config.toml.tmpl"
)
_UPDATE_CRIO = "systemctl restart crio  # after an update to CRI-O 1.23 or later"


def check_host(host: HostSeen) -> tuple[Finding, ...]:
    """All findings about a host."""
    found = (_driver(host), _cdi(host), _ports(host), *check_imex(host))
    return tuple(msgspec.structs.replace(one, where=(host.here,)) for one in found)


def _driver(host: HostSeen) -> Finding:
    found = host.driver_version
    fix = f"cat /proc/driver/nvidia/version  # install NVIDIA's driver {OLDEST_DRIVER} or later"
    if found is None:
        return unknown(
            DRIVER, host.here, "no NVIDIA kernel module is loaded, or its version is not readable", fix
        )
    if is_too_old(found):
        return fails(DRIVER, host.here, f"driver {found} is older than {OLDEST_DRIVER}", fix)
    return holds(DRIVER, host.here, f"driver {found}")


def _cdi(host: HostSeen) -> Finding:
    """By what containerd is configured to, else by what is known of the runtime's version."""
    name, _, version = (host.runtime or "containerd").partition("://")
    since = _CDI_BY_DEFAULT.get(name)
    if name == "containerd" and host.cdi_setting is not CdiSetting.UNSAID:
        return _configured(host)
    if host.runtime is None:
        return _runtime_unknown(host, "which container runtime it has is not known")
    if since is None or not numbers(version):
        return _runtime_unknown(host, f"whether {host.runtime} has CDI on is not known here")
    if numbers(version) < since:
        return fails(CDI, host.here, f"{host.runtime} has CDI off unless it is configured", _enable(host))
    return holds(CDI, host.here, f"{host.runtime} has it on by default")


def _configured(host: HostSeen) -> Finding:
    if host.cdi_setting is CdiSetting.ON:
        return holds(CDI, host.here, "switched on by the container runtime's configuration")
    if host.cdi_setting is CdiSetting.OFF:
        return fails(CDI, host.here, "the container runtime's configuration switches CDI off", _enable(host))
    said = "containerd's configuration, or a file that it imports, cannot be read or understood"
    return unknown(CDI, host.here, said, "containerd config dump  # on the host: says what is wrong")


def _enable(host: HostSeen) -> str:
    """K3s and RKE2 run a containerd of their own, of versions such as 1.7.20-k3s1."""
    runtime = host.runtime or ""
    if runtime.startswith("cri-o"):
        return _UPDATE_CRIO
    return _ENABLE_CDI_IN_K3S if "-k3s" in runtime else _ENABLE_CDI


def _runtime_unknown(host: HostSeen, said: str) -> Finding:
    return unknown(CDI, host.here, said, "kubectl get nodes -o wide  # shows the runtime of each")


def _ports(host: HostSeen) -> Finding:
    if host.busy_ports is None:
        return unknown(PORTS, host.here, "sockets are not readable", "sudo rackloom doctor  # on the host")
    taken = sorted({IMEX_SERVER_PORT, IMEX_COMMAND_PORT} & host.busy_ports)
    if taken:
        which = " and ".join(str(port) for port in taken)
        listening = " or ".join(f"sport = :{port}" for port in taken)
        fix = f"ss -ltnp '{listening}'  # stop what listens there"
        return fails(PORTS, host.here, f"something on the host listens on port {which}", fix)
    return holds(PORTS, host.here, f"nobody listens on {IMEX_SERVER_PORT} and {IMEX_COMMAND_PORT}")
