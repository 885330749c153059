"""The operator's settings for the NICs of a node: profiles, attributes, and the publication filter.

- Profiles are named NetworkConfigs that a claim may refer to. Single settings of the claim win, and lists
  are joined. DRANET gets them from a cloud or a webhook.
- Stated attributes are added to devices, by name or `*` for all, under full names such as
  `example.com/fabric`. Those of dra.net and resource.kubernetes.io are reserved. They supply
  values that no cloud's metadata has (`metadata`), and win over those that it has:

    "*": {oke.dra.net/rackId: r7, oke.dra.net/hpcIslandId: i1}
    pci-0000-8a-00-0: {example.com/fabric: a, example.com/port: 3}

- The filter is DRANET's `--filter`: a CEL expression over `attributes`, which maps full names
  (`dra.net/ifName`) to values with the fields of Kubernetes' Go type (StringValue, BoolValue, IntValue,
  VersionValue; unset ones are null). If the expression fails for a device, the device is published. If
  it gives no truth value, the device is not published.

Files are YAML or JSON, a mapping of mappings. Everything is read at the start. Errors are refused with
the place.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rackloom.core.allocate.attributes import LONGEST_TEXT
from rackloom.core.allocate.objects import Device, DeviceAttribute
from rackloom.core.cluster.device_configs import refuse_problems
from rackloom.core.domains.network_config import (
    NETWORK_CONFIG_KIND,
    NetworkConfig,
    decode_network_config,
    network_config_problems,
)
from rackloom.errors import Refused, Undecodable, file_error_text
from rackloom.runtime.foreign_text import decode_yaml_document

# Reading a file.


def read_mapping_file(file: Path, shape: str) -> Mapping[str, Mapping[str, Any]]:
    """The content of `file`. Raises `Refused` if it is not `shape`, such as "from names to settings"."""
    try:
        found = decode_yaml_document(file.read_bytes(), str(file))
    except OSError as error:
        raise Refused(
            f"{file} cannot be read: {file_error_text(error)}", nearest_fix="name a file"
        ) from error
    except Undecodable as error:
        raise Refused(
            f"{file} is not YAML: {error.reason}", nearest_fix="correct it; see docs/nics.md"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise Refused(f"{file} is not a mapping {shape}", nearest_fix="see docs/nics.md")
    return {str(name): entry for name, entry in found.items()}


# Profiles.


class Profiles(msgspec.Struct, frozen=True):
    """Profiles by name."""

    known: Mapping[str, NetworkConfig] = {}

    def applied_to(self, config: NetworkConfig) -> NetworkConfig:
        """The config with its profile's settings below its own. Raises `Refused` for an unknown name."""
        if config.profile is None:
            return config
        profile = self.known.get(config.profile)
        if profile is None:
            names = ", ".join(sorted(self.known)) or "none"
            raise Refused(
                f"NetworkConfig: profile {config.profile!r} is not known: this node has {names}",
                nearest_fix="write the settings into the config, or into the file of `node nic --profiles`",
            )
        both = _merge_configs(config, profile)
        refuse_problems(
            NETWORK_CONFIG_KIND,
            network_config_problems(both),
            "the profile and the config contradict each other: change one",
        )
        return both


NO_PROFILES = Profiles()


def read_profiles(file: Path) -> Profiles:
    """Read a file of profiles. Raises `Refused` with the reason if the file is invalid."""
    found = read_mapping_file(file, "from names to NetworkConfigs")
    return Profiles({name: _read_profile(file, name, parameters) for name, parameters in found.items()})


def _read_profile(file: Path, name: str, parameters: Mapping[str, Any]) -> NetworkConfig:
    try:
        config = decode_network_config(parameters)
    except Refused as trouble:
        raise Refused(
            f"{file}: profile {name}: {trouble.reason}", nearest_fix=trouble.nearest_fix
        ) from trouble
    if config.profile is not None:
        raise Refused(f"{file}: profile {name} refers to another one", nearest_fix="write its settings out")
    return config


def _merge_configs(config: NetworkConfig, profile: NetworkConfig) -> NetworkConfig:
    """Single settings of the config win. Lists are joined, without duplicates."""
    return NetworkConfig(
        interface=_filled_from(config.interface, profile.interface),
        routes=_join_lists(profile.routes, config.routes),
        rules=_join_lists(profile.rules, config.rules),
        neighbors=_join_lists(profile.neighbors, config.neighbors),
        ethtool=msgspec.structs.replace(
            config.ethtool,
            features={**profile.ethtool.features, **config.ethtool.features},
            private_flags={**profile.ethtool.private_flags, **config.ethtool.private_flags},
        ),
    )


def _filled_from(config: Any, profile: Any) -> Any:
    """`config` with the profile's value wherever it leaves the default."""
    defaults = {
        field.name: getattr(profile, field.name)
        for field in msgspec.structs.fields(config)
        if getattr(config, field.name) == field.default
    }
    return msgspec.structs.replace(config, **defaults)


def _join_lists(first: tuple[Any, ...], more: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*first, *more)))


# Stated attributes.


EVERY_DEVICE = "*"
_FULL_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?/[A-Za-z_][A-Za-z0-9_]{0,31}")
_RESERVED = ("dra.net/", "resource.kubernetes.io/")

StatedAttributes = Mapping[str, Mapping[str, DeviceAttribute]]
"""Attributes by the device's name."""


def read_stated_attributes(file: Path) -> StatedAttributes:
    """Read a file of attributes. Raises `Refused` with the reason if the file is invalid."""
    return {
        device: {str(name): _stated_attribute(file, str(name), value) for name, value in attributes.items()}
        for device, attributes in read_mapping_file(file, "from devices to attributes").items()
    }


def with_stated_attributes(device: Device, extras: StatedAttributes) -> Device:
    """The device with the operator's attributes for it. Those of its name win over those for all."""
    stated = {**extras.get(EVERY_DEVICE, {}), **extras.get(device.name, {})}
    return msgspec.structs.replace(device, attributes={**device.attributes, **stated}) if stated else device


def _stated_attribute(file: Path, name: str, value: Any) -> DeviceAttribute:
    if not _FULL_NAME.fullmatch(name) or name.startswith(_RESERVED):
        raise Refused(
            f"{file}: {name!r} is not the full name of an attribute that may be stated",
            nearest_fix="write DOMAIN/NAME, with another domain than dra.net and resource.kubernetes.io",
        )
    if isinstance(value, bool):
        return DeviceAttribute(bool_=value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return DeviceAttribute(int_=value)
    if isinstance(value, str) and len(value.encode()) <= LONGEST_TEXT:
        return DeviceAttribute(string=value)
    raise Refused(
        f"{file}: {name} is {value!r}",
        nearest_fix=f"give a text of up to {LONGEST_TEXT} bytes, a number or a truth value",
    )


# The filter.


NIC_DOMAIN = "dra.net"
FILTER_VARIABLE = "attributes"
PublishFilter = Callable[[Device], bool]
"""Whether a device is published."""


def publish_everything(_: Device) -> bool:
    """The filter that leaves nothing out."""
    return True


def compile_filter(expression: str) -> PublishFilter:
    """An empty expression leaves nothing out, as in DRANET.

    Raises `Refused` for an expression that can never be evaluated.
    """
    if not expression.strip():
        return publish_everything
    # Four mebibytes that a node without a filter need not hold.
    from cel_expr_python import cel

    environment = cel.NewEnv(variables={FILTER_VARIABLE: cel.Type.Map(cel.Type.STRING, cel.Type.DYN)})
    try:
        program = environment.compile(expression)
    except Exception as error:
        # The library raises any error of its C++ half.
        raise Refused(f"--filter {expression!r}: {error}", nearest_fix=_FILTER_EXAMPLE) from error
    if program.return_type() not in (cel.Type.BOOL, cel.Type.DYN):
        raise Refused(f"--filter {expression!r} is no condition", nearest_fix=_FILTER_EXAMPLE)

    def is_published(device: Device) -> bool:
        value = program.eval(data={FILTER_VARIABLE: filter_fields(device.attributes)})
        return value.plain_value() is True if value.type() != cel.Type.ERROR else True

    return is_published


def filter_fields(attributes: Mapping[str, DeviceAttribute]) -> dict[str, Any]:
    """Attributes as the expression sees them."""
    return {
        name if "/" in name else f"{NIC_DOMAIN}/{name}": {
            "StringValue": attribute.string,
            "BoolValue": attribute.bool_,
            "IntValue": attribute.int_,
            "VersionValue": attribute.version,
        }
        for name, attribute in attributes.items()
    }


_FILTER_EXAMPLE = f"write a condition, such as {FILTER_VARIABLE}['dra.net/type'].StringValue != 'veth'"
