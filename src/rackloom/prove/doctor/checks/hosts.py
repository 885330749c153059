"""One node, as far as IMEX needs it: its driver, CDI, and nobody else where the daemon wants to be."""

from rackloom.prove.doctor.evidence import HostSeen
from rackloom.prove.doctor.findings import Finding, fails, holds, unknown

DRIVER, CDI, HOST_IMEX, PORTS = "driver version", "CDI on", "host nvidia-imex off", "IMEX ports free"
ALL = (DRIVER, CDI, HOST_IMEX, PORTS)
OLDEST_DRIVER = (570, 158, 1)
"""The first driver whose IMEX works under ComputeDomains (NVIDIA's DRA driver, installation guide)."""
SERVER_PORT, COMMAND_PORT = 50000, 50005
_CDI_BY_DEFAULT = {"containerd": (2, 0), "cri-o": (1, 23)}
"""From which version a runtime has CDI on unless its configuration says otherwise (CDI README)."""


def check_host(host: HostSeen) -> tuple[Finding, ...]:
    """All findings about a node."""
    return _driver(host), _cdi(host), _host_imex(host), _ports(host)


def _driver(host: HostSeen) -> Finding:
    found = host.driver_version
    fix = f"cat /proc/driver/nvidia/version  # install NVIDIA's driver {_text(OLDEST_DRIVER)} or later"
    if found is None:
        return unknown(
            DRIVER, _on(host), "no NVIDIA kernel module is loaded, or its version is not readable", fix
        )
    if _numbers(found) < OLDEST_DRIVER:
        return fails(DRIVER, _on(host), f"driver {found} is older than {_text(OLDEST_DRIVER)}", fix)
    return holds(DRIVER, _on(host), f"driver {found}")


def _cdi(host: HostSeen) -> Finding:
    fix = "systemctl restart containerd  # after enable_cdi = true for the CRI plugin in its config.toml"
    if host.cdi_setting is False:
        return fails(CDI, _on(host), "the container runtime's configuration switches CDI off", fix)
    if host.cdi_setting:
        return holds(CDI, _on(host), "switched on by the container runtime's configuration")
    if host.runtime is None:
        return unknown(
            CDI,
            _on(host),
            "which container runtime it has is not known",
            f"kubectl get node {host.node} -o wide",
        )
    name, _, version = host.runtime.partition("://")
    since = _CDI_BY_DEFAULT.get(name)
    if since is None:
        return unknown(
            CDI,
            _on(host),
            f"{host.runtime} is not a runtime that is known here",
            f"kubectl get node {host.node} -o wide  # see the manual of its runtime",
        )
    if _numbers(version) < since:
        return fails(CDI, _on(host), f"{host.runtime} has CDI off unless it is configured", fix)
    return holds(CDI, _on(host), f"{host.runtime} has it on by default")


def _host_imex(host: HostSeen) -> Finding:
    fix = "systemctl disable --now nvidia-imex  # a node holds one IMEX session, which the daemon's pod needs"
    if host.imex_processes:
        running = ", ".join(str(pid) for pid in host.imex_processes)
        return fails(HOST_IMEX, _on(host), f"nvidia-imex runs outside of pods (process {running})", fix)
    if host.imex_enabled:
        return fails(HOST_IMEX, _on(host), "nvidia-imex starts with the host", fix)
    if host.imex_processes is None or host.imex_enabled is None:
        return unknown(
            HOST_IMEX, _on(host), "processes or units are not readable", "sudo rackloom doctor  # on the host"
        )
    return holds(HOST_IMEX, _on(host), "no nvidia-imex outside of pods")


def _ports(host: HostSeen) -> Finding:
    if host.busy_ports is None:
        return unknown(PORTS, _on(host), "sockets are not readable", "nsenter -t 1 -n rackloom doctor")
    taken = sorted({SERVER_PORT, COMMAND_PORT} & host.busy_ports)
    if taken:
        which = " and ".join(str(port) for port in taken)
        fix = f"ss -ltnp 'sport = :{taken[0]}'  # stop what listens there"
        return fails(PORTS, _on(host), f"something on the host listens on port {which}", fix)
    return holds(PORTS, _on(host), f"nobody listens on {SERVER_PORT} and {COMMAND_PORT}")


def _on(host: HostSeen) -> str:
    return f"node {host.node}"


def _numbers(version: str) -> tuple[int, ...]:
    """`570.158.01` or `v2.0.0-rc.1` as numbers; what is no number ends it."""
    found: list[int] = []
    for part in version.lstrip("v").split("."):
        digits = part.split("-")[0].split("+")[0]
        if not digits.isdigit():
            break
        found.append(int(digits))
    return tuple(found)


def _text(version: tuple[int, int, int]) -> str:
    return f"{version[0]}.{version[1]}.{version[2]:02}"
