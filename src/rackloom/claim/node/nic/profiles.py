"""Named settings that a claim's config may refer to as `profile`, from a file of the node.

DRANET asks a cloud or a webhook for them. Here the operator writes them down: a mapping from names to
NetworkConfigs, as YAML or JSON.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rackloom.claim.node.nic.stated import read_stated
from rackloom.claim.opaque.decode import refuse
from rackloom.claim.opaque.network import NetworkConfig
from rackloom.claim.opaque.network_rules import KIND, decode_network_config, problems
from rackloom.errors import Refused


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
        both = _over(config, profile)
        refuse(KIND, problems(both), "the profile and the config contradict each other: change one")
        return both


NO_PROFILES = Profiles()


def read_profiles(file: Path) -> Profiles:
    """Read a file of profiles. Raises `Refused` with what is wrong."""
    found = read_stated(file, "from names to NetworkConfigs")
    return Profiles({name: _read(file, name, one) for name, one in found.items()})


def _read(file: Path, name: str, parameters: Mapping[str, Any]) -> NetworkConfig:
    try:
        config = decode_network_config(parameters)
    except Refused as trouble:
        raise Refused(
            f"{file}: profile {name}: {trouble.reason}", nearest_fix=trouble.nearest_fix
        ) from trouble
    if config.profile is not None:
        raise Refused(f"{file}: profile {name} refers to another one", nearest_fix="write its settings out")
    return config


def _over(config: NetworkConfig, profile: NetworkConfig) -> NetworkConfig:
    """Single settings of the config win; lists are put together, what is in both once."""
    return NetworkConfig(
        interface=_filled(config.interface, profile.interface),
        routes=_joined(profile.routes, config.routes),
        rules=_joined(profile.rules, config.rules),
        neighbors=_joined(profile.neighbors, config.neighbors),
        ethtool=msgspec.structs.replace(
            config.ethtool,
            features={**profile.ethtool.features, **config.ethtool.features},
            private_flags={**profile.ethtool.private_flags, **config.ethtool.private_flags},
        ),
    )


def _filled(wish: Any, profile: Any) -> Any:
    """`wish` with the profile's value wherever it leaves the default."""
    said = {
        field.name: getattr(profile, field.name)
        for field in msgspec.structs.fields(wish)
        if getattr(wish, field.name) == field.default
    }
    return msgspec.structs.replace(wish, **said)


def _joined(first: tuple[Any, ...], more: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*first, *more)))
