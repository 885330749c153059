"""Reading what a claim allocated, from the API server's own ResourceClaim objects."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rackloom.errors import Refused, why
from rackloom.prove.transfer.isolation import Allocated

NIC_DRIVER = "dra.net"
_PCI_NAME = re.compile(r"pci-([0-9a-f]{4,})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])")
"""How the driver names a PCI device: `pci-0000-8a-00-0`."""


class _Result(msgspec.Struct, frozen=True):
    driver: str
    device: str


class _Devices(msgspec.Struct, frozen=True):
    results: tuple[_Result, ...] = ()


class _Allocation(msgspec.Struct, frozen=True):
    devices: _Devices = _Devices()


class _Status(msgspec.Struct, frozen=True):
    allocation: _Allocation | None = None


class _Claim(msgspec.Struct, frozen=True):
    status: _Status = _Status()


def read_allocation(file: Path) -> Allocated:
    """The NICs of the claims in `file`: one ResourceClaim, a List or several documents, as YAML or JSON.

    Such a file is what `kubectl get resourceclaims -o yaml` prints.

    Raises:
        Refused: the file cannot be read, or no claim in it is allocated.
    """
    import yaml

    try:
        documents = list(yaml.safe_load_all(file.read_text()))
    except OSError as error:
        raise Refused(
            f"{file} cannot be read: {why(error)}", nearest_fix="name a file with ResourceClaims"
        ) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise Refused(
            f"{file} is not YAML: {error}", nearest_fix="name a file with ResourceClaims"
        ) from error
    try:
        claims = [msgspec.convert(one, _Claim) for document in documents for one in _claims(document)]
    except msgspec.ValidationError as error:
        raise Refused(
            f"{file}: {error}", nearest_fix="save it with `kubectl get resourceclaims -o yaml`"
        ) from error
    found = [claim.status.allocation for claim in claims if claim.status.allocation is not None]
    if not found:
        raise Refused(
            f"{file} holds no ResourceClaim that is allocated",
            nearest_fix="save it once the pod is scheduled, with `kubectl get resourceclaims -o yaml`",
        )
    results = (result for allocation in found for result in allocation.devices.results)
    return Allocated(tuple(_host_name(one.device) for one in results if one.driver == NIC_DRIVER))


def _claims(document: Any) -> Iterator[Any]:
    if isinstance(document, dict) and document.get("kind") == "ResourceClaim":
        yield document
    elif isinstance(document, dict) and isinstance(document.get("items"), list):
        for item in document["items"]:
            yield from _claims(item)


def _host_name(device: str) -> str:
    """The PCI address in the name of a PCI device; other devices are named after their interface."""
    found = _PCI_NAME.fullmatch(device)
    return device if found is None else "{}:{}:{}.{}".format(*found.groups())
