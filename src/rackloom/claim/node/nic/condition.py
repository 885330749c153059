"""Whether a NIC works, as far as it shows on the host. Pure."""

from rackloom.claim.node.nic.offered import Offered
from rackloom.claim.node.values import DeviceHealth, Health


def health_of(one: Offered, pool: str, at: float) -> DeviceHealth:
    """Whether a NIC has a link; one that is not published is unknown, and says why."""
    health, message = _health(one)
    return DeviceHealth(pool=pool, device=one.name, health=health, observed_at=at, message=message)


def _health(one: Offered) -> tuple[Health, str]:
    """By the RDMA port, which shows wherever the interface is, else by the interface."""
    if one.excluded is not None:
        return Health.UNKNOWN, f"not published: {one.excluded}"
    if one.rdma is not None and one.rdma.ports:
        states = {port.state for port in one.rdma.ports}
        return _by(states, good="active", what=f"RDMA device {one.rdma.name}")
    if one.on is None:
        return Health.UNKNOWN, "its interface is not on the host"
    return _by({one.on.link.state}, good="up", what=f"interface {one.on.link.name}")


def _by(states: set[str], *, good: str, what: str) -> tuple[Health, str]:
    if good in states:
        return Health.HEALTHY, ""
    if states <= {"unknown"}:
        return Health.UNKNOWN, f"{what} does not tell its state"
    return Health.UNHEALTHY, f"{what} is {', '.join(sorted(states))}"
