"""The listeners of every command, with the limits that `rackloom.serving.limits` sets."""

from docs.site.reference.markdown import code, made_from, table

from rackloom.serving.limits import LISTENERS, ConnectionLimits, GrpcLimits, HttpLimits, ProbeLimits

HEAD = ("process", "listener", "reached by", "requires", "connections, of an address", "limits of each")


def page() -> str:
    """Every listener, in the order of `LISTENERS`."""
    rows = [
        (
            code(listener.process),
            listener.name,
            listener.reachable,
            listener.requires,
            f"{listener.limits.connections}, {listener.limits.connections_of_an_address}",
            limits_in_words(listener.limits),
        )
        for listener in LISTENERS
    ]
    return (
        f"# Listeners\n\n{made_from('`rackloom.serving.limits`')}\n"
        "Each time limit starts when the one before ends: handshake, head, body, answer. `unread` counts\n"
        "while the client does not read an answer that the kernel no longer takes. It is the only limit of\n"
        "an event stream. `demo` and `twin play` listen as `up` does. The time limit of the transfer's\n"
        "control channel is for each connection, and the channel serves one connection after the other.\n\n"
        f"{table(HEAD, rows)}"
    )


def limits_in_words(limits: ConnectionLimits) -> str:
    """The limits of one connection, in seconds and bytes."""
    if isinstance(limits, HttpLimits):
        head = (
            f"head {limits.head_bytes >> 10} KiB, {limits.head_fields} fields and {limits.head_seconds:g} s"
        )
        answer = "no limit" if limits.answer_seconds is None else f"{limits.answer_seconds:g} s"
        return (
            f"handshake {limits.handshake_seconds:g} s, {head}, body {limits.body_seconds:g} s,"
            f" answer {answer}, unread {limits.unread_seconds:g} s, idle {limits.idle_seconds} s"
        )
    if isinstance(limits, GrpcLimits):
        idle = "" if limits.idle_seconds is None else f", idle {limits.idle_seconds:g} s"
        age = "" if limits.age_seconds is None else f", age {limits.age_seconds:g} s"
        return (
            f"handshake {limits.handshake_seconds:g} s, metadata {limits.metadata_bytes >> 10} KiB,"
            f" message {limits.message_bytes >> 20} MiB, {limits.streams} calls at a time"
            f"{idle}{age}"
        )
    if isinstance(limits, ProbeLimits):
        head = f"head {limits.head_bytes >> 10} KiB and {limits.head_seconds:g} s"
        return f"{head}, unread {limits.unread_seconds:g} s"
    return f"handshake {limits.handshake_seconds:g} s"
