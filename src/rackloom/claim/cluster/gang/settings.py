"""What an operator chooses for the gang controller."""

import msgspec


class GangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    settle: float = 2.0
    """Between the reservation of the last tray and a fresh look at all of them: kube-scheduler may still bind
    a pod that it decided on before it saw the taint."""
    lost_after: float = 300.0
    """A tray that is not ready for so long is lost: its members are deleted and go to a spare. As long as the
    node controller waits before it evicts pods."""
    bind_after: float = 120.0
    """A pod that was let go and is not bound for so long is looked after."""
    again: float = 15.0
    """Between two attempts to place a gang that does not fit: pods of others end without telling us."""
