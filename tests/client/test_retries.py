"""Retries and errors, with a stand-in for the network, a clock that does not wait, and chosen chance."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from rackloom.client import (
    AsyncClient,
    Client,
    Conflict,
    Connection,
    Missing,
    NotDecided,
    NotPermitted,
    NotUnderstood,
    OutcomeUnknown,
    RequestRefused,
    RetryPolicy,
    SignIn,
    Times,
    models,
    operations,
)
from rackloom.errors import Refused, Retry, Unknown

CONNECTION = Connection(url="https://site.example", org="demo", token="t")
READ, DELETE = operations.get_machine_gpu_stats(), operations.delete_vpc("v")
CHANGE = operations.create_vpc(models.VpcCreate(name="net", site_id="s"))
GPUS: list[Any] = []
Answer = httpx2.Response | Exception


def problem(status: int, message: str = "because", headers: Any = None, **data: Any) -> httpx2.Response:
    body = {"source": "nico", "message": message, "data": data or None}
    return httpx2.Response(status, json=body, headers=headers)


class Site:
    """Gives the planned answers one after another, and records requests and pauses."""

    def __init__(self, *answers: Answer) -> None:
        self.answers: Iterator[Answer] = iter(answers)
        self.requests: list[httpx2.Request] = []
        self.pauses: list[float] = []
        self.time = 0.0

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds

    def client(self, *, random: float = 1.0, **policy: Any) -> Client:
        return Client(
            CONNECTION,
            retries=RetryPolicy(**policy),
            transport=httpx2.MockTransport(self.answer),
            sleep=self.sleep,
            times=Times(lambda: self.time, lambda: random, lambda: 1000.0 + self.time),
        )


def lost() -> Exception:
    return httpx2.ReadError("the connection broke")


def refused() -> Exception:
    return httpx2.ConnectError("nobody listens")


def ok(value: Any = GPUS) -> httpx2.Response:
    return httpx2.Response(200, json=value)


@pytest.mark.parametrize("answer", [problem(429), problem(503), problem(502), lost(), refused()])
def test_a_read_is_repeated(answer: Answer) -> None:
    site = Site(answer, ok())
    assert site.client().call(READ) == []
    assert len(site.requests) == 2
    assert site.pauses == [0.2]


def test_pauses_double_up_to_a_limit_and_half_of_them_is_chance() -> None:
    site = Site(*[problem(503)] * 6)
    with pytest.raises(NotDecided, match="because"):
        site.client(attempts=6, longest_delay=1.0).call(READ)
    assert site.pauses == [0.2, 0.4, 0.8, 1.0, 1.0]
    other = Site(*[problem(503)] * 6)
    with pytest.raises(NotDecided):
        other.client(attempts=6, longest_delay=1.0, random=0.0).call(READ)
    assert other.pauses == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_retry_after_is_obeyed() -> None:
    site = Site(problem(429, headers={"Retry-After": "7"}), ok())
    site.client().call(READ)
    assert site.pauses == [7.0]


def test_a_pause_beyond_the_time_is_not_begun() -> None:
    site = Site(problem(503, "full", headers={"Retry-After": "90"}))
    with pytest.raises(NotDecided, match="full") as caught:
        site.client(seconds=60).call(READ)
    assert (caught.value.after, caught.value.status, site.pauses) == (90.0, 503, [])


@pytest.mark.parametrize(("answer", "error"), [(lost(), OutcomeUnknown), (problem(503), NotDecided)])
def test_a_change_whose_outcome_is_not_sure_is_not_repeated(answer: Answer, error: type[Exception]) -> None:
    site = Site(answer)
    with pytest.raises(error):
        site.client().call(CHANGE)
    assert len(site.requests) == 1


def test_the_error_of_a_lost_answer_says_when_it_was_sent() -> None:
    site = Site(lost())
    site.time = 5.0
    with pytest.raises(Unknown, match=r"the connection broke; the change may have been made") as caught:
        site.client().call(CHANGE)
    assert caught.value.since == 1005.0


@pytest.mark.parametrize("answer", [problem(429), refused()])
def test_a_change_that_nobody_carried_out_is_repeated(answer: Answer) -> None:
    site = Site(answer, problem(409))
    with pytest.raises(Conflict):
        site.client().call(CHANGE)
    assert len(site.requests) == 2


def test_a_change_is_repeated_where_the_caller_says_that_it_may_be() -> None:
    site = Site(lost(), problem(503), problem(409))
    with pytest.raises(Conflict):
        site.client().call(CHANGE, safe=True)
    assert [request.content for request in site.requests] == [b'{"name":"net","siteId":"s"}'] * 3


def test_a_deletion_is_repeated() -> None:
    site = Site(lost(), httpx2.Response(202, json={"message": "accepted"}))
    assert site.client().call(DELETE).message == "accepted"


def test_nobody_answers() -> None:
    site = Site(*[refused()] * 3)
    with pytest.raises(Retry, match=r"no answer: nobody listens \(3 attempts\)"):
        site.client(attempts=3).call(READ)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, RequestRefused), (401, SignIn), (403, NotPermitted), (404, Missing), (409, Conflict),
        (412, RequestRefused), (422, RequestRefused),
    ],
)  # fmt: skip
def test_refusals(status: int, error: type[RequestRefused]) -> None:
    site = Site(problem(status, "no", nearestFix="ask for less", name="is used"))
    with pytest.raises(Refused, match=r"no \(name: is used\)") as caught:
        site.client().call(READ)
    assert type(caught.value) is error
    assert isinstance(caught.value, RequestRefused)
    assert (caught.value.status, caught.value.message) == (status, "no")
    assert caught.value.nearest_fix == "ask for less"
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.Response(404, html="<h1>nginx</h1>"),
        httpx2.Response(302, headers={"Location": "https://elsewhere.example"}),
        problem(500, "Internal error: nothing was changed"),
        ok({"unexpected": True}),
        httpx2.Response(200, content=b"not json"),
    ],
)
def test_what_is_no_answer_of_the_service(answer: httpx2.Response) -> None:
    site = Site(answer)
    with pytest.raises(NotUnderstood) as caught:
        site.client().call(READ)
    assert caught.value.status == answer.status_code
    assert len(site.requests) == 1


def test_an_answer_of_a_newer_service_may_have_more_fields() -> None:
    site = Site(httpx2.Response(202, json={"message": "accepted", "new": [1]}))
    assert site.client().call(DELETE) == models.Message(message="accepted")


@pytest.mark.parametrize("bad", ["", ".", ".."])
def test_an_id_cannot_change_the_path(bad: str) -> None:
    with pytest.raises(ValueError, match="cannot be an id"):
        operations.get_vpc(bad)


def test_an_id_is_quoted() -> None:
    site = Site(problem(404))
    with pytest.raises(Missing):
        site.client().call(operations.get_vpc("a/../b?c#d"))
    assert site.requests[0].url.raw_path == b"/v2/org/demo/nico/vpc/a%2F..%2Fb%3Fc%23d"


def test_queries() -> None:
    site = Site(ok())
    pages = site.client().pages(operations.get_all_instance(status=["Ready", "Error"], name="a b"), size=7)
    assert next(pages).items == []
    assert dict(site.requests[0].url.params.multi_items()) == {
        "status": "Error", "name": "a b", "pageNumber": "1", "pageSize": "7",
    }  # fmt: skip
    assert site.requests[0].url.params.get_list("status") == ["Ready", "Error"]


def test_what_is_not_given_is_not_sent_and_what_is_empty_is() -> None:
    site = Site(problem(404))
    with pytest.raises(Missing):
        site.client().call(operations.update_vpc("v", models.VpcUpdate(nv_link_logical_partition_id="")))
    assert site.requests[0].content == b'{"nvLinkLogicalPartitionId":""}'


# Pages.


def page(items: list[Any], total: int | None, **headers: str) -> httpx2.Response:
    paging = {} if total is None else {"X-Pagination": f'{{"total": {total}}}'}
    return httpx2.Response(
        200, json=items, headers=paging | {k.replace("_", "-"): v for k, v in headers.items()}
    )


CAPABILITY = {"type": "CPU", "name": "a CPU"}


def test_pages_are_read_when_they_are_needed() -> None:
    site = Site(page([CAPABILITY] * 2, 3), page([CAPABILITY], 3))
    items = site.client().items(operations.get_all_machine_capabilities(), size=2)
    next(items)
    assert len(site.requests) == 1
    assert len(list(items)) == 2
    assert [request.url.params["pageNumber"] for request in site.requests] == ["1", "2"]


def test_a_page_that_ends_exactly_is_the_last_one() -> None:
    site = Site(page([CAPABILITY] * 2, 2))
    assert len(list(site.client().items(operations.get_all_machine_capabilities(), size=2))) == 2


def test_a_list_that_goes_on_elsewhere() -> None:
    site = Site(page([], 0, X_Audit_Continue="before=e1"), page([], 0))
    assert list(site.client().items(operations.get_all_audit_entry())) == []
    assert [request.url.params.get("before") for request in site.requests] == [None, "e1"]


@pytest.mark.parametrize("size", [0, 101])
def test_no_such_page(size: int) -> None:
    with pytest.raises(ValueError, match="1 to 100"):
        next(Site().client().pages(operations.get_all_vpc(), size=size))


# Events.


def stream(*events: tuple[str, str]) -> httpx2.Response:
    text = ": sign of life\n\n" + "".join(
        f'id: {number}\nevent: {kind}\ndata: {{"message": "m", "id": "i", "status": "Ready"}}\n\n'
        for number, kind in events
    )
    return httpx2.Response(200, text=text, headers={"Content-Type": "text/event-stream"})


def test_events_go_on_where_the_stream_broke() -> None:
    site = Site(stream(("1", "vpc"), ("2", "vpc")), lost(), problem(503), stream(("3", "instance")))
    events = site.client().events()
    assert [next(events).kind for _ in range(3)] == ["vpc", "vpc", "instance"]
    assert [request.headers.get("Last-Event-ID") for request in site.requests] == [None, "2", "2", "2"]


def test_events_end_with_an_error_where_nobody_answers() -> None:
    site = Site(*[refused()] * 3)
    with pytest.raises(NotDecided, match="nobody listens"):
        next(site.client(attempts=3).events())
    signed_out = Site(problem(401, "the token has ended"))
    with pytest.raises(SignIn):
        next(signed_out.client().events())


# asyncio.


def test_the_asynchronous_client_retries_by_the_same_rules() -> None:
    site = Site(problem(503, headers={"Retry-After": "3"}), lost(), ok())

    async def sleep(seconds: float) -> None:
        site.sleep(seconds)

    async def answer(request: httpx2.Request) -> httpx2.Response:
        return site.answer(request)

    async def read() -> Any:
        times = Times(lambda: site.time, lambda: 1.0, lambda: 0.0)
        transport = httpx2.MockTransport(answer)
        async with AsyncClient(CONNECTION, transport=transport, sleep=sleep, times=times) as client:
            return await client.call(READ)

    assert asyncio.run(read()) == []
    assert site.pauses == [3.0, 0.4]


@pytest.mark.parametrize("where", ["request", "pause"])
def test_a_task_can_be_cancelled_and_the_client_goes_on(where: str) -> None:
    begun = asyncio.Event()

    async def wait_for_ever(_: object) -> Any:
        begun.set()
        await asyncio.Event().wait()

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/machine/gpu/stats"):
            return ok()
        return await wait_for_ever(request) if where == "request" else problem(503)

    async def run() -> Any:
        transport = httpx2.MockTransport(answer)
        async with AsyncClient(CONNECTION, transport=transport, sleep=wait_for_ever) as client:
            task = asyncio.create_task(client.call(operations.get_metadata()))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await client.call(READ)

    assert asyncio.run(run()) == []
