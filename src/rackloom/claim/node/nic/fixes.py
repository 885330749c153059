"""What to do about what the kernel refused while a NIC was brought into a pod. Pure."""

import errno
from collections.abc import Mapping

_GATEWAY = "name a gateway within interface.addresses, or add a route of scope 253 (link) to it before"
_MISSING = "look on the node whether its driver still shows the interface (ip link, rdma link)"
_UNSUPPORTED = "take that setting out of the NetworkConfig: this kernel or this device does not have it"
_VALUE = "ask for a value that the device takes: `ip -details link` on the node shows its limits"
_FIXES: Mapping[int, str] = {
    errno.EEXIST: "choose another interface.name: the pod has an interface of that name",
    errno.ENETUNREACH: _GATEWAY,
    errno.EHOSTUNREACH: _GATEWAY,
    errno.ENOENT: _MISSING,
    errno.ENODEV: _MISSING,
    errno.EOPNOTSUPP: _UNSUPPORTED,
    errno.EINVAL: _VALUE,
    errno.ERANGE: _VALUE,
    errno.EPERM: "run the plugin with the capabilities of deploy/kubernetes/base/node-nic.yaml",
    errno.EACCES: "run the plugin with the capabilities of deploy/kubernetes/base/node-nic.yaml",
    errno.EBUSY: "stop what uses the device on the node: a bond, a bridge, or a program",
    errno.ETIMEDOUT: "see whether the network's router answers on this NIC, or give interface.addresses",
}
OTHERWISE = "see the plugin's log on the node; kubelet tries again by itself"


def fix_of(error: OSError) -> str:
    """The nearest fix for what the kernel said."""
    return _FIXES.get(error.errno or 0, OTHERWISE)
