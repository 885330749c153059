"""The target: registers a buffer, serves its address, and then only keeps progress going.

Software transports move data only while someone drives them. NIXL's progress thread does it here, in native
code, so this process can wait on the control channel; a target that merely sleeps and polls costs a factor
of sixteen over TCP.
"""

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from rackloom.errors import Refused, Retry
from rackloom.prove.transfer.channel import Channel, Wire, accept
from rackloom.prove.transfer.evidence import Recorder
from rackloom.prove.transfer.host import take
from rackloom.prove.transfer.memory import Agent, open_agent
from rackloom.prove.transfer.messages import Begin, Begun, Finish, Finished, Offer, Refusal, Served
from rackloom.prove.transfer.values import Host, Seat, TransferSpec

HANDSHAKE_SECONDS = 10.0
"""How long a connection may take to prove that it holds the secret and to make its offer."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the kernel choose.

    Raises:
        Refused: the address is not ours or taken.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise Refused(
            f"cannot listen on {host} port {port}: {error}",
            nearest_fix="give an address of this host and a free port",
        ) from error


def serve(
    listener: socket.socket,
    secret: bytes,
    seat: Seat,
    turned_away: Callable[[str, str], None],
    *,
    once: bool,
    deadline: float | None,
) -> None:
    """Take one initiator after the other; with `once` stop after the first that completes.

    `turned_away` hears (peer address, reason) of each one that does not hold the secret or breaks off.

    Raises:
        Retry: nobody completed before `deadline` (of time.monotonic).
    """
    while True:
        listener.settimeout(None if deadline is None else max(0.01, deadline - time.monotonic()))
        try:
            sock, address = listener.accept()
        except TimeoutError:
            raise Retry("no initiator came in time", after=1.0) from None
        wire = Wire(sock, time.monotonic() + HANDSHAKE_SECONDS, time.monotonic)
        try:
            measure(wire, secret, seat)
        except (Refused, Retry) as trouble:
            turned_away(f"{address[0]} port {address[1]}", trouble.reason)
        else:
            if once:
                return
        finally:
            wire.close()


def measure(wire: Wire, secret: bytes, seat: Seat) -> None:
    """Be the target of one measurement over a fresh connection.

    Raises:
        Refused: the initiator does not hold the secret, or asks for what this host cannot do.
        Retry: the initiator is gone or too slow.
    """
    channel = accept(wire, secret)
    spec = channel.receive(Offer).spec
    wire.deadline = time.monotonic() + spec.timeout_seconds
    with ExitStack() as stack:
        try:
            host = take(seat)
            agent = stack.enter_context(open_agent("target", spec, seat, progress_thread=True))
        except Refused as refused:
            channel.send(Refusal(refused.reason, refused.nearest_fix))
            raise
        if spec.op == "READ":
            agent.buffer.fill(spec.seed)
        channel.send(
            Served(agent.nixl.get_agent_metadata(), agent.buffer.blocks(spec.block_size), agent.buffer.memory)
        )
        record_timed_part(channel, agent, spec, host)
        with suppress(Retry):  # the initiator closes the connection once its request is released
            channel.receive(Begin)


def record_timed_part(channel: Channel, agent: Agent, spec: TransferSpec, host: Host) -> None:
    """From the end of the warm-ups to the digest; warm-up data cannot pass for timed data."""
    channel.receive(Begin)
    if spec.op == "WRITE":
        agent.buffer.wipe()
    recorder = Recorder(host)
    channel.send(Begun())
    channel.receive(Finish)
    channel.send(Finished(recorder.finish(agent.buffer)))
