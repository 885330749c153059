"""The addresses of this host, which plain text does not leave and no proxy reaches."""

from ipaddress import ip_address


def is_this_host(name: str) -> bool:
    """Whether the host of a URL is this host's loopback: 127.0.0.0/8, ::1, localhost and names below it."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
