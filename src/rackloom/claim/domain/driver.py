"""Versions of NVIDIA's driver, and the oldest with which ComputeDomains work."""

OLDEST_DRIVER = "570.158.01"
"""The first whose IMEX daemon resolves its peers' names anew while it runs (NVIDIA's DRA driver)."""


def numbers(version: str) -> tuple[int, ...]:
    """`570.158.01` or `v2.0.0-rc.1` as numbers; what is no number ends it."""
    found: list[int] = []
    for part in version.lstrip("v").split("."):
        digits = part.split("-")[0].split("+")[0]
        if not digits.isdigit():
            break
        found.append(int(digits))
    return tuple(found)


def is_too_old(driver: str) -> bool:
    """Whether a driver of this version is older."""
    return numbers(driver) < numbers(OLDEST_DRIVER)
