"""Which addresses are this host's own: plain text does not leave it, and no proxy reaches them."""

from ipaddress import ip_address


def is_this_host(name: str) -> bool:
    """Whether the host of a URL is this host's loopback: 127.0.0.0/8, ::1, localhost and names below it."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
