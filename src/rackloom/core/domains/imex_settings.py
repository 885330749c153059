"""Settings of nvidia-imex that operators may change, and why the others are Rackloom's.

`read_imex_settings` reads NAME=VALUE pairs and checks each against the options that nvidia-imex has: three
may be chosen, and Rackloom writes the others itself, because its own probes, policies and certificates
depend on them. The controller and each daemon read the same text with it, so a daemon refuses the text that
a controller refuses at its start. All problems are reported at once, each with its remedy.

Values are words or numbers from fixed sets, so none can hold a line break and add another option.

Source: the options and values that NVIDIA's IMEX service guide lists.
"""

import re
from collections.abc import Iterator, Mapping

from rackloom.core.cluster.names import IMEX_COMMAND_PORT, IMEX_SERVER_PORT
from rackloom.errors import Refused

ImexSettings = Mapping[str, str]
"""Checked settings by the names of nvidia-imex."""

IMEX_SETTING_DEFAULTS: ImexSettings = {
    "LOG_LEVEL": "4",
    # After an unsafe stop, wait for the nodes that had imported memory, so that no stale reference stays.
    "IMEX_WAIT_FOR_QUORUM": "RECOVERY",
    # Keep the imports of a peer for as long as it is away.
    "IMEX_NODE_DISCONNECTED_GRACE_TIME": "-1",
}
"""The values that Rackloom writes for settings that an operator may choose."""
_ALLOWED: Mapping[str, range | tuple[str, ...]] = {
    "LOG_LEVEL": range(5),
    "IMEX_WAIT_FOR_QUORUM": ("RECOVERY", "NONE"),
    # Seconds. NVIDIA names no largest value, so it is that of a signed 32-bit number.
    "IMEX_NODE_DISCONNECTED_GRACE_TIME": range(-1, 2**31),
}

_AUTHENTICATION = (
    "peers show certificates that the controller issues for each ComputeDomain; leave it out, or switch all"
    " authentication off for the cluster with --no-daemon-authentication"
)
_GSS = "it belongs to GSSAPI, and daemons authenticate by certificates; leave it out"
_ADDRESS = "a daemon listens at the address of its pod; for another network, give those pods another address"
_PORT = (
    f"the daemons' NetworkPolicies open ports {IMEX_SERVER_PORT} and {IMEX_COMMAND_PORT}, and each pod has an"
    " address of its own, where they are free; leave it out"
)
_COMMANDS = "readiness and the mesh are asked at the pod's address; leave it out"
_LOG = (
    "nvidia-imex logs to the container's log, from which the reason of a failed start is read; collect that"
    " log, and set LOG_LEVEL for less of it"
)
_RACKLOOMS: Mapping[str, str] = {
    "IMEX_ENABLE_AUTH_ENCRYPTION": _AUTHENTICATION,
    "IMEX_AUTH_ENCRYPTION_MODE": _AUTHENTICATION,
    "IMEX_AUTH_SOURCE": _AUTHENTICATION,
    "IMEX_SERVER_KEY": _AUTHENTICATION,
    "IMEX_SERVER_CERT": _AUTHENTICATION,
    "IMEX_SERVER_CERT_AUTH": _AUTHENTICATION,
    "IMEX_CLIENT_KEY": _AUTHENTICATION,
    "IMEX_CLIENT_CERT": _AUTHENTICATION,
    "IMEX_CLIENT_CERT_AUTH": _AUTHENTICATION,
    "IMEX_SECURITY_TARGET_OVERRIDE": _AUTHENTICATION,
    "IMEX_GSS_SERVICE_NAME": _GSS,
    "IMEX_GSS_TIMEOUT_SEC": _GSS,
    "IMEX_GSS_RETRY_INTERVAL_SEC": _GSS,
    "IMEX_GSS_SEC_CONTEXT_LIFETIME_SEC": _GSS,
    "IMEX_GSS_SHUTDOWN_ON_FAILURE": _GSS,
    "BIND_INTERFACE_IP": _ADDRESS,
    "NETWORK_INTERFACE": _ADDRESS,
    "IMEX_CMD_BIND_INTERFACE_IP": _ADDRESS,
    "SERVER_PORT": _PORT,
    "IMEX_CMD_PORT": _PORT,
    "IMEX_CMD_ENABLED": _COMMANDS,
    "IMEX_CMD_UNIX_DOMAIN_PATH": _COMMANDS,
    "IMEX_NODE_CONFIG_FILE": (
        "the nodes of a domain are those that join its clique; for room for more of them, set"
        " --max-nodes-per-imex-domain"
    ),
    "DAEMONIZE": "the container lives as long as the program; leave it out",
    "LOG_FILE_NAME": _LOG,
    "LOG_APPEND_TO_LOG": _LOG,
    "LOG_FILE_MAX_SIZE": _LOG,
    "LOG_MAX_ROTATE_COUNT": _LOG,
    "LOG_USE_SYSLOG": _LOG,
    "STATS_FILE_NAME": _LOG,
}
"""The reason why Rackloom writes an option itself, and the way to get its effect."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,9})", re.ASCII)


def read_imex_settings(text: str) -> ImexSettings:
    """The settings of NAME=VALUE pairs with commas between, none for an empty text. Raises `Refused`.

    Spaces around names and values do not count.
    """
    split = (pair.partition("=") for pair in text.split(",") if pair.strip())
    pairs = [(name.strip(), value.strip()) for name, _, value in split]
    names = [name for name, _ in pairs]
    repeated = [f"{name} is set twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    problems = [problem for name, value in pairs for problem in _problems(name, value)]
    if problems or repeated:
        choices = ", ".join(f"{name} ({_words(allowed)})" for name, allowed in _ALLOWED.items())
        raise Refused(
            f"settings of nvidia-imex: {'; '.join([*problems, *repeated])}",
            nearest_fix=f"settings that may be chosen: {choices}",
        )
    return dict(pairs)


def imex_settings_text(settings: ImexSettings) -> str:
    """The text that `read_imex_settings` reads as these settings."""
    return ",".join(f"{name}={value}" for name, value in sorted(settings.items()))


def _problems(name: str, value: str) -> Iterator[str]:
    allowed = _ALLOWED.get(name)
    if name in _RACKLOOMS:
        yield f"{name} is Rackloom's: {_RACKLOOMS[name]}"
    elif allowed is None:
        yield f"nvidia-imex has no option {name!r}"
    elif not _is_allowed(value, allowed):
        yield f"{name} is {value!r}, not {_words(allowed)}"


def _is_allowed(value: str, allowed: range | tuple[str, ...]) -> bool:
    if isinstance(allowed, range):
        return _NUMBER.fullmatch(value) is not None and int(value) in allowed
    return value in allowed


def _words(allowed: range | tuple[str, ...]) -> str:
    if isinstance(allowed, range):
        return f"{allowed.start} to {allowed.stop - 1}"
    return " or ".join(allowed)
