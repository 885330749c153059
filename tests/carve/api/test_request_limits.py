"""Limits on the requests of an organisation: rate, places, waiting, refusals."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2
import msgspec
import pytest

from rackloom.carve.api import limits as module
from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import Caller, Role
from rackloom.carve.api.limits import (
    CallerClass,
    CallerLimits,
    OrgQueue,
    RequestLimitMiddleware,
    RequestLimits,
)
from rackloom.lab.virtual.event_loop import run_simulation

LIMITS = RequestLimits(rate=10.0, burst=2, concurrent=2, waiting=3)
WIDE = RequestLimits(rate=1000.0, burst=1000, concurrent=100, waiting=100)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _simulated(story: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return run_simulation(7, story)


def test_requests_beyond_the_burst_begin_at_the_rate() -> None:
    async def story() -> list[float]:
        queue = OrgQueue(msgspec.structs.replace(LIMITS, waiting=100), _now)
        began = _now()

        async def request() -> float:
            await queue.enter()
            queue.leave()
            return _now() - began

        return sorted(await asyncio.gather(*(request() for _ in range(12))))

    times = _simulated(story)
    assert times == pytest.approx([0.0, 0.0, *(number / 10 for number in range(1, 11))], abs=5e-3)


def test_no_more_are_in_service_than_there_are_places() -> None:
    async def story() -> int:
        queue, most, now = OrgQueue(msgspec.structs.replace(WIDE, concurrent=3), _now), 0, 0

        async def request() -> None:
            nonlocal most, now
            await queue.enter()
            now += 1
            most = max(most, now)
            await asyncio.sleep(1.0)
            now -= 1
            queue.leave()

        await asyncio.gather(*(request() for _ in range(20)))
        assert queue.is_idle()
        return most

    assert _simulated(story) == 3


def test_those_who_wait_are_served_in_their_order() -> None:
    async def story() -> list[int]:
        queue, order = OrgQueue(msgspec.structs.replace(LIMITS, waiting=9, concurrent=1), _now), []

        async def request(number: int) -> None:
            await queue.enter()
            order.append(number)
            await asyncio.sleep(0.3)
            queue.leave()

        tasks = []
        for number in range(6):
            tasks.append(asyncio.create_task(request(number)))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        return order

    assert _simulated(story) == [0, 1, 2, 3, 4, 5]


def test_one_more_than_may_wait_is_refused_with_the_time_until_they_are_served() -> None:
    async def story() -> int:
        queue = OrgQueue(msgspec.structs.replace(LIMITS, rate=0.5), _now)
        for _ in range(2):
            await queue.enter()
        waiting = [asyncio.create_task(queue.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(module.TooManyRequests) as refusal:
            await queue.enter()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return refusal.value.retry_after

    assert _simulated(story) == 6


def test_who_is_cancelled_while_waiting_leaves_no_trace() -> None:
    async def story() -> None:
        queue = OrgQueue(msgspec.structs.replace(LIMITS, concurrent=1), _now)
        await queue.enter()
        gone, handed, last = (asyncio.create_task(queue.enter()) for _ in range(3))
        await asyncio.sleep(1.0)
        gone.cancel()
        await asyncio.sleep(1.0)
        # One more is let in, and cancelled before it can begin.
        queue.leave()
        for task in (handed, last):
            if not task.done():
                task.cancel()
                break
        results = await asyncio.gather(gone, handed, last, return_exceptions=True)
        assert sum(result is None for result in results) == 1
        queue.leave()
        await asyncio.sleep(60.0)
        assert queue.is_idle()

    _simulated(story)


# The middleware.


def _scope(org: str = "busy", *roles: Role) -> dict[str, Any]:
    caller = Caller("somebody", org, frozenset(roles or (Role.TENANT_ADMIN,)), 9e9)
    return {"type": "http", "method": "GET", "path": "/", "headers": [], "state": {"caller": caller}}


def _upload() -> dict[str, Any]:
    return {**_scope(), "method": "POST", "headers": [(b"content-length", b"2")]}


async def _unread() -> Any:
    raise AssertionError("the body was read")


class _Service:
    """An ASGI application behind the middleware. The test decides when its requests end."""

    def __init__(self, limits: CallerLimits, content_type: bytes = b"application/json") -> None:
        self.middleware = RequestLimitMiddleware(self._answer, limits)
        self.content_type = content_type
        self.begun = 0
        self.answers = asyncio.Event()
        self.ends = asyncio.Event()

    async def _answer(self, _scope: Any, _receive: Any, send: Any) -> None:
        self.begun += 1
        await self.answers.wait()
        headers = [(b"content-type", self.content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.ends.wait()
        await send({"type": "http.response.body", "body": b""})

    async def request(self, scope: dict[str, Any], receive: Any = _unread) -> tuple[int, dict[bytes, bytes]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await self.middleware(scope, receive, send)
        return (sent[0]["status"], dict(sent[0]["headers"])) if sent else (0, {})


def test_an_organisation_does_not_use_up_what_others_may_have() -> None:
    async def story() -> None:
        refused: list[CallerClass] = []
        limits = CallerLimits(tenant=LIMITS, provider=WIDE, refused=refused.append)
        service = _Service(limits)
        async with asyncio.TaskGroup() as tasks:
            busy = [tasks.create_task(service.request(_scope())) for _ in range(8)]
            await asyncio.sleep(0.01)
            # Two in service, three waiting, three refused.
            assert service.begun == 2
            done = [await task for task in busy if task.done()]
            assert [status for status, _ in done] == [429] * 3
            assert all(headers[b"retry-after"] == b"1" for _, headers in done)
            assert refused == [CallerClass.TENANT] * 3
            tasks.create_task(service.request(_scope("quiet")))
            admin = _scope("busy", Role.PROVIDER_ADMIN)
            tasks.create_task(service.request(admin))
            await asyncio.sleep(0.01)
            assert service.begun == 4
            service.answers.set()
            service.ends.set()

    _simulated(story)


def test_a_stream_occupies_no_place_once_its_answer_has_begun() -> None:
    async def story() -> None:
        limits = CallerLimits(tenant=LIMITS, provider=WIDE)
        service = _Service(limits, b"text/event-stream; charset=utf-8")
        service.answers.set()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(service.request(_scope()))
            await asyncio.sleep(60.0)
            assert service.begun == 5
            service.ends.set()

    _simulated(story)


def test_an_answer_occupies_its_place_until_it_was_sent() -> None:
    async def story() -> None:
        service = _Service(CallerLimits(tenant=LIMITS, provider=WIDE))
        service.answers.set()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(service.request(_scope()))
            await asyncio.sleep(60.0)
            assert service.begun == LIMITS.concurrent
            service.ends.set()

    _simulated(story)


def test_a_body_that_arrives_slowly_occupies_no_place() -> None:
    async def story() -> None:
        service = _Service(CallerLimits(tenant=LIMITS, provider=WIDE))
        service.answers.set()
        service.ends.set()
        rest = asyncio.Event()

        async def slowly() -> Any:
            await rest.wait()
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async with asyncio.TaskGroup() as tasks:
            slow = [tasks.create_task(service.request(_upload(), slowly)) for _ in range(4)]
            await asyncio.sleep(1.0)
            # As many bodies are received as requests may wait.
            assert [(await task)[0] for task in slow if task.done()] == [429]
            assert (await service.request(_scope()))[0] == 200
            rest.set()
        assert sorted([(await task)[0] for task in slow]) == [200, 200, 200, 429]

    _simulated(story)


def test_a_client_that_leaves_before_its_body_is_whole_is_not_served() -> None:
    async def story() -> None:
        service = _Service(CallerLimits(tenant=LIMITS, provider=WIDE))

        async def leave() -> Any:
            return {"type": "http.disconnect"}

        await service.request(_upload(), leave)
        assert service.begun == 0

    _simulated(story)


def test_queues_of_idle_organisations_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUES_BEFORE_SWEEP", 10)

    async def story() -> None:
        service = _Service(CallerLimits(tenant=LIMITS, provider=WIDE))
        service.answers.set()
        service.ends.set()
        for number in range(100):
            await service.request(_scope(f"org {number}"))
            await asyncio.sleep(1.0)
            assert len(service.middleware._queues) <= 10

    _simulated(story)


def test_the_refusal_of_the_real_application(api: Any) -> None:
    limits = RequestLimits(rate=0.001, burst=1, concurrent=1, waiting=1)
    app = create_app(api.client.app.state.deps, CallerLimits(tenant=limits, provider=limits))
    headers = {"Authorization": f"Bearer {api.token()}"}

    async def story() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://site") as client:
            path = "/v2/org/demo/nico/metadata"
            first = await client.get(path, headers=headers)
            # One of two waits for a token, and the other is refused.
            both = [asyncio.create_task(client.get(path, headers=headers)) for _ in range(2)]
            (done,), (waits,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            waits.cancel()
            refused = await done
            unverified = await client.get(path)
            return [first, refused, unverified]

    first, refused, unverified = api.site.runner.run(story())
    assert (first.status_code, refused.status_code, unverified.status_code) == (200, 429, 401)
    assert refused.headers["retry-after"] == "1000"
    assert refused.json() == {"source": "nico", "message": module.TOO_MANY_MESSAGE, "data": None}
