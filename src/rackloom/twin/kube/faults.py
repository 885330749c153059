"""What can go wrong between a client and the fake server, and how long things take; drawn from a seed."""

import asyncio
import random
from dataclasses import dataclass
from typing import Literal

from rackloom.claim.kube.api import Kind, KubeError

ANY = "*"


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it is counted and as faults see it.

    Verbs: get list watch create replace apply patch delete. A subresource is part of the resource
    (`computedomains/status`).
    """

    user: str
    verb: str
    resource: str

    @property
    def is_write(self) -> bool:
        """Whether it asks for a change."""
        return self.verb not in ("get", "list", "watch")


def resource_of(kind: Kind, subresource: str = "") -> str:
    """A resource as calls name it."""
    return f"{kind.plural}/{subresource}" if subresource else kind.plural


@dataclass(frozen=True, slots=True)
class Fault:
    """Requests that fail. `rate` is a probability; `lost="reply"` carries it out and loses the answer.

    `code` 0 is a broken connection. A watch that is hit breaks at once.
    """

    rate: float = 1.0
    verb: str = ANY
    resource: str = ANY
    user: str = ANY
    code: int = 0
    reason: str = "ServiceUnavailable"
    retry_after: float | None = None
    lost: Literal["request", "reply"] = "request"

    def hits(self, call: Call) -> bool:
        """Whether it is about this call."""
        pairs = ((self.verb, call.verb), (self.resource, call.resource), (self.user, call.user))
        return all(wanted in (ANY, found) for wanted, found in pairs)

    def error(self) -> KubeError:
        """What the client gets."""
        message = "connection reset by peer" if self.code == 0 else f"injected: {self.reason}"
        reason = "Unreachable" if self.code == 0 else self.reason
        return KubeError(self.code, reason, message, retry_after=self.retry_after)


@dataclass(frozen=True, slots=True)
class _Delay:
    verb: str
    resource: str
    shortest: float
    longest: float


class Faults:
    """Declared latencies and faults of one server. Nothing is declared at first: it is prompt and sound."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        self._faults: list[Fault] = []
        self._delays: list[_Delay] = []
        self.hits = 0
        """Calls that failed since the faults were cleared."""

    def add(self, fault: Fault) -> None:
        """From now on."""
        self._faults.append(fault)

    def clear(self) -> None:
        """Nothing fails from now on; latencies stay."""
        self._faults.clear()
        self.hits = 0

    def delay(
        self, seconds: float, longest: float | None = None, *, verb: str = ANY, resource: str = ANY
    ) -> None:
        """How long calls take: `seconds`, or between that and `longest`. The latest that fits counts."""
        self._delays.append(_Delay(verb, resource, seconds, seconds if longest is None else longest))

    async def pass_time(self, call: Call) -> None:
        """Wait as long as the call takes."""
        for delay in reversed(self._delays):
            if delay.verb in (ANY, call.verb) and delay.resource in (ANY, call.resource):
                await asyncio.sleep(self._random.uniform(delay.shortest, delay.longest))
                return

    def strike(self, call: Call, lost: Literal["request", "reply"]) -> None:
        """Raise the error of a fault that hits."""
        for fault in self._faults:
            if fault.lost == lost and fault.hits(call) and self._random.random() < fault.rate:
                self.hits += 1
                raise fault.error()
