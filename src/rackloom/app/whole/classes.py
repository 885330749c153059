"""The device classes that an installation of Rackloom brings; a cluster of the twin has them at once."""

from collections.abc import Iterator

from rackloom.claim.domain import names
from rackloom.claim.kube.api import Object
from rackloom.claim.node.nic.plugin import DRIVER as NIC_DRIVER

_IMEX = names.IMEX_DRIVER
_TYPES = {
    names.DAEMON_CLASS: (_IMEX, "daemon", ""),
    names.CHANNEL_CLASS: (_IMEX, "channel", f" && device.attributes['{_IMEX}'].id == 0"),
    names.ISOLATED_CHANNEL_CLASS: (_IMEX, names.ISOLATED_CHANNEL_TYPE, ""),
    "gpu.nvidia.com": (names.GPU_DRIVER, "gpu", ""),
    "mig.nvidia.com": (names.GPU_DRIVER, "mig", ""),
    "vfio.gpu.nvidia.com": (names.GPU_DRIVER, "vfio", ""),
}
"""Driver, type, and what else; those of deploy/kubernetes."""


def device_classes() -> Iterator[Object]:
    """DeviceClass objects; that of NICs is the one of examples/nixl-kv-transfer."""
    for name, (driver, kind, more) in _TYPES.items():
        yield _class(
            name, f"device.driver == '{driver}' && device.attributes['{driver}'].type == '{kind}'{more}"
        )
    yield _class("dranet.net", f"device.driver == '{NIC_DRIVER}'")


def _class(name: str, expression: str) -> Object:
    return {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}
