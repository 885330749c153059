"""While no process records readings, tenants and operators read unknown since the last, without a write."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from tests.carve.conftest import DOMAINS

from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.carve.api import events as stream
from rackloom.carve.api.auth import Role
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventKind, EventNote
from rackloom.core.diagnosis.snapshot import SiteSnapshot
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS, READING_VALID_SECONDS, valid_seconds

BOTH_STORES = True


def ready(api: Any) -> tuple[Any, float]:
    """An instance that is Ready, and when its domain was read last."""
    api.site.observe_all()
    made = api.instance(api.vpc(partition=api.partition()))
    api.site.converge()
    shown = api.get(f"instance/{made['id']}").json()
    assert shown["status"] == "Ready"
    domain = api.get("nvlink-domain").json()[0]
    assert domain["status"] == "Observed"
    return shown, api.site.now


def age(api: Any) -> str:
    """Let every reading become outdated. Returns since when domain 0 is unknown, as on the wire."""
    (known, *_) = api.get("nvlink-domain", role=Role.PROVIDER_VIEWER).json()
    api.site.tick(DEFAULT_VALID_SECONDS + 2.0)
    return str(known["observedAt"])


def test_a_ready_instance_is_unknown_since_its_domain_was_last_read(api: Any) -> None:
    made, _ = ready(api)
    since = age(api)
    shown = api.get(f"instance/{made['id']}").json()
    assert (shown["status"], shown["unknownSince"], shown["isUpdatePending"]) == ("Configuring", since, False)
    newest = shown["statusHistory"][0]
    assert (newest["status"], newest["created"]) == ("Unknown", since)
    assert newest["message"].startswith(f"unknown since {since}: no reading")
    assert api.get(f"instance/{made['id']}/status-history").json()[0] == newest
    interfaces = shown["nvLinkInterfaces"]
    assert {interface["status"] for interface in interfaces} == {"Pending"}
    assert {interface["statusMessage"] for interface in interfaces} == {newest["message"]}


def test_one_moment_before_it_is_ready(api: Any) -> None:
    made, _ = ready(api)
    (known, *_) = api.get("nvlink-domain").json()
    api.site.tick(DEFAULT_VALID_SECONDS - known["observationAgeSeconds"])
    assert api.get(f"instance/{made['id']}").json()["status"] == "Ready"


def test_what_was_never_ready_is_shown_as_recorded(api: Any) -> None:
    """It claims nothing about the present, and its history gets no entry."""
    made, _ = ready(api)
    waiting = api.instance(made["vpcId"], "waiting")
    before = api.get(f"instance/{waiting['id']}").json()
    age(api)
    shown = api.get(f"instance/{waiting['id']}").json()
    assert shown == before
    assert api.get(f"instance/{waiting['id']}/status-history").json() == before["statusHistory"]


def test_filters_find_what_is_shown(api: Any) -> None:
    made, _ = ready(api)
    age(api)
    found = {
        status: [instance["id"] for instance in api.get(f"instance?status={status}").json()]
        for status in ("Ready", "Configuring", "Unknown")
    }
    assert found == {"Ready": [], "Configuring": [made["id"]], "Unknown": [made["id"]]}
    for path in ("nvlink-interface", f"instance/{made['id']}/nvlink-interface"):
        assert api.get(f"{path}?status=Ready").json() == []
        pending = api.get(f"{path}?status=Pending&includeRelation=Instance").json()
        assert {interface["instance"]["status"] for interface in pending} == {"Configuring"}
        assert len(pending) == 4


def test_searches_and_orders_go_by_what_is_shown(api: Any) -> None:
    """As filters do. One of two instances is in a domain that is still read."""
    made, _ = ready(api)
    chosen = {"name": "other", "vpcId": made["vpcId"], "machineId": "chassis1-0"}
    other = api.new("instance", chosen)["id"]
    api.site.converge()
    assert api.get(f"instance/{other}").json()["status"] == "Ready"
    age(api)
    api.site.observe(list(api.site.partitions)[1])

    def ids(path: str, field: str = "id") -> list[str]:
        return [found[field] for found in api.get(path).json()]

    assert ids("instance?query=ready") == [other]
    assert ids("instance?query=unknown") == [made["id"]]
    for direction, ordered in (("ASC", [other, made["id"]]), ("DESC", [made["id"], other])):
        assert ids(f"instance?orderBy=STATUS_{direction}") == ordered
    # Of interfaces, Pending comes before Ready.
    for direction, ordered in (("ASC", [made["id"], other]), ("DESC", [other, made["id"]])):
        found = ids(f"nvlink-interface?orderBy=STATUS_{direction}", "instanceId")
        assert list(dict.fromkeys(found)) == ordered


def test_interfaces_in_a_logical_partition_are_shown_alike(api: Any) -> None:
    made, _ = ready(api)
    age(api)
    partition = made["nvLinkInterfaces"][0]["nvLinkLogicalPartitionId"]
    shown = api.get(f"nvlink-logical-partition/{partition}?includeInterfaces=true").json()
    assert {interface["status"] for interface in shown["nvLinkInterfaces"]} == {"Pending"}


def test_domains_endpoints_partitions_and_machines_are_unknown(api: Any) -> None:
    ready(api)
    since = age(api)
    for role in (Role.PROVIDER_ADMIN, Role.TENANT_ADMIN):
        for domain in api.get("nvlink-domain", role=role).json():
            assert (domain["status"], domain["observedAt"]) == ("Unknown", None)
            assert domain["statusMessage"].startswith("unknown since ")
    assert since in {domain["unknownSince"] for domain in api.get("nvlink-domain").json()}
    endpoints = api.get("nvlink-nmxc-endpoint", role=Role.PROVIDER_ADMIN).json()
    assert all(endpoint["unknownSince"] == endpoint["observedAt"] for endpoint in endpoints)
    assert api.get("nvlink-partition", role=Role.PROVIDER_ADMIN).json() == []
    machines = api.get("machine?includeMetadata=true", role=Role.PROVIDER_ADMIN).json()
    healths = {gpu["health"] for machine in machines for gpu in machine["metadata"]["nvLinkInfo"]["gpus"]}
    assert healths == {"unknown"}


def test_snapshots_of_the_map_and_the_doctor_are_unknown(api: Any) -> None:
    ready(api)

    def snapshot() -> SiteSnapshot:
        found: SiteSnapshot = api.site.runner.run(site_snapshot(api.site.now, records=api.site.store))
        return found

    assert {gpu.status for gpu in snapshot().instance_gpus} == {"Ready"}
    since = age(api)
    shown = snapshot()
    assert {(gpu.status, gpu.problem[:14]) for gpu in shown.instance_gpus} == {("Pending", "unknown since ")}
    assert since in {rfc3339(domain.unknown_since or 0.0) for domain in shown.domains}


def test_what_is_read_again_is_ready_again(api: Any) -> None:
    made, _ = ready(api)
    age(api)
    api.site.observe_all()
    shown = api.get(f"instance/{made['id']}").json()
    assert (shown["status"], shown["unknownSince"]) == ("Ready", None)
    assert shown["statusHistory"][0]["status"] == "Ready"


@pytest.mark.parametrize("later", [0.0, READING_VALID_SECONDS])
def test_a_loss_that_is_recorded_late_is_of_the_same_time(api: Any, later: float) -> None:
    """Readers were shown that time already."""
    made, _ = ready(api)
    since = age(api)
    api.site.tick(later)
    assert api.get(f"instance/{made['id']}").json()["unknownSince"] == since
    for domain in DOMAINS:
        api.site.lose(domain)
    domains = api.get("nvlink-domain").json()
    assert since in {domain["unknownSince"] for domain in domains}
    shown = api.get(f"instance/{made['id']}").json()
    assert shown["statusHistory"][0]["message"].count(f"unknown since {since}")


def test_a_domain_that_is_still_read_is_not_affected(api: Any) -> None:
    made, _ = ready(api)
    domain = made["nvLinkInterfaces"][0]["nvLinkDomainId"]
    api.site.tick(DEFAULT_VALID_SECONDS + 2.0)
    for other in set(DOMAINS) - {domain}:
        api.site.observe(other)
    states = {shown["id"]: shown["status"] for shown in api.get("nvlink-domain").json()}
    assert states == {name: "Unknown" if name == domain else "Observed" for name in DOMAINS}
    assert api.get(f"instance/{made['id']}").json()["unknownSince"] is not None


def test_streams_say_so_and_say_when_it_is_over(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.0)
    made, _ = ready(api)
    age(api)
    start = api.site.now
    heard = follow(api, [start, start + 1.0, start - 400.0])
    instance = [json.loads(event.data) for event in heard if event.event == "instance"]
    assert [(event["id"], event["status"]) for event in instance] == [
        (made["id"], "Unknown"),
        (made["id"], "Ready"),
    ]
    assert [json.loads(event.data)["status"] for event in heard if event.event == "nvlink-interface"] == [
        *["Pending"] * 4,
        *["Ready"] * 4,
    ]
    newest = api.site.read(journal.newest_event_number, api.site.tenant.id)
    assert [event.id for event in heard] == [f"{newest}u"] * 9 + [str(newest)]


def test_streams_do_not_say_ready_from_a_backlog_after_unknown(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(stream, "BATCH", 2)
    made, _ = ready(api)
    age(api)
    heard = follow(api, [api.site.now] * 40, after=0)
    assert statuses_of(made["id"], heard)[-2:] == ["Ready", "Unknown"]
    assert statuses_of(made["id"], heard).count("Unknown") == 1
    newest = api.site.read(journal.newest_event_number, api.site.tenant.id)
    assert heard[-1].id == f"{newest}u"


def test_who_resumes_lists_again_where_something_was_shown_otherwise_than_recorded(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later reading arrived without a write: the record was Ready all the time."""
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.0)
    made, _ = ready(api)
    age(api)
    shown = follow(api, [api.site.now])
    assert statuses_of(made["id"], shown) == ["Unknown"]
    for domain in DOMAINS:
        api.site.observe(domain)
    resumed = follow(api, [api.site.now] * 2, after=shown[-1].id)
    assert [event.event for event in resumed] == ["reset"]
    assert api.get(f"instance/{made['id']}").json()["status"] == "Ready"
    assert follow(api, [api.site.now] * 2, after=resumed[-1].id) == []


def test_who_resumes_while_it_lasts_is_told_of_it_after_the_reset(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(stream, "BATCH", 2)
    ready(api)
    age(api)
    shown = follow(api, [api.site.now] * 40)
    for name in ("red", "green", "blue"):
        api.vpc(name)
    resumed = follow(api, [api.site.now] * 40, after=shown[-1].id)
    kinds = [event.event for event in resumed]
    assert kinds == ["vpc"] * 3 + ["reset", "instance"] + ["nvlink-interface"] * 4
    # A client that is disconnected here, even right after the reset, lists again at the next attempt.
    assert all(stream.position_of(event.id).in_doubt for event in resumed)


def test_events_of_other_objects_keep_the_doubt_and_one_of_the_object_ends_it(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.0)
    ready(api)
    age(api)
    note = EventNote(EventKind.VPC, "another", "Ready")
    heard = follow(
        api, [api.site.now] * 3, late=(journal.publish_events, api.site.tenant.id, [note], api.site.now)
    )
    assert json.loads(heard[-1].data)["id"] == "another"
    assert stream.position_of(heard[-1].id).in_doubt
    ended = [
        EventNote(EventKind(event.event), json.loads(event.data)["id"], "Terminating") for event in heard[:5]
    ]
    heard = follow(
        api,
        [api.site.now, *[api.site.now - 400.0] * 2],
        late=(journal.publish_events, api.site.tenant.id, ended, api.site.now),
    )
    assert [stream.position_of(event.id).in_doubt for event in heard[:10]] == [True] * 9 + [False]


def test_streams_say_again_that_it_is_unknown_after_an_event_says_ready(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica may have written it late."""
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.0)
    made, _ = ready(api)
    age(api)
    note = EventNote(EventKind.INSTANCE, made["id"], "Ready")
    late = (journal.publish_events, api.site.tenant.id, [note], api.site.now)
    heard = follow(api, [api.site.now] * 3, late=late)
    assert statuses_of(made["id"], heard) == ["Unknown", "Ready", "Unknown"]


def statuses_of(object_id: str, heard: list[Any]) -> list[str]:
    reported = [json.loads(event.data) for event in heard]
    return [event["status"] for event in reported if event["id"] == object_id]


def follow(
    api: Any, times: list[float], after: int | str | None = None, late: tuple[Any, ...] | None = None
) -> list[Any]:
    """The events of a stream that polls at these times. `late` is written after its first event."""
    at = itertools.chain(times, itertools.repeat(9e9))
    deps = msgspec.structs.replace(api.client.app.state.deps, clock=lambda: next(at))

    async def collect() -> list[Any]:
        newest = (await deps.store.read(stream._start, "demo"))[1]
        first = stream.position_of(str(newest if after is None else after))
        source = stream.follow(deps, api.site.tenant.id, first, newest, until=8e9)
        found = []
        async for event in source:
            found.append(event)
            if late is not None and len(found) == 1:
                await deps.store.run(*late)
        return found

    found: list[Any] = api.site.runner.run(collect())
    return found


@pytest.mark.parametrize(("interval", "seconds"), [(1.0, 43.0), (60.0, 220.0), (300.0, 600.0)])
def test_the_age_follows_from_the_interval_and_never_exceeds_that_of_comparisons(
    interval: float, seconds: float
) -> None:
    assert valid_seconds(interval) == seconds <= READING_VALID_SECONDS
