"""TCP ports and networks of loopback for programs that take a number, not a name."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_MARK = 29_999
"""The port by which a network is taken: only one socket of the machine can have an address and a port."""


@contextmanager
def reserved_ports(count: int = 1) -> Iterator[int]:
    """The first of `count` ports in a row that no other program gets until the end.

    They are bound without a listener: a program that sets SO_REUSEADDR, as servers do, can still listen.
    """
    with ExitStack() as stack:
        yield _bound_in_a_row(stack, count)


@contextmanager
def reserved_network() -> Iterator[str]:
    """The first two numbers of a network, such as 127.8, that no other test gets until the end."""
    with socket.socket() as mark:
        yield next(network for number in range(2, 251) if _is_taken(mark, network := f"127.{number}"))


def _is_taken(mark: socket.socket, network: str) -> bool:
    try:
        mark.bind((f"{network}.255.254", _MARK))
    except OSError:
        return False  # It is taken. Another will do.
    return True


def _bound_in_a_row(stack: ExitStack, count: int) -> int:
    while True:
        with ExitStack() as attempt:
            first = _bound(attempt, 0)
            try:
                for number in range(1, count):
                    _bound(attempt, first + number)
            except (OSError, OverflowError):
                continue  # One of them is taken. Other ports will do.
            stack.enter_context(attempt.pop_all())
            return first


def _bound(stack: ExitStack, port: int) -> int:
    listener = stack.enter_context(socket.socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return int(listener.getsockname()[1])
