"""Service accounts: no more than their makers may do, keys that are shown once, and revocation at once."""

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from rackloom.carve.api.app import BUILT_IN
from rackloom.carve.api.auth import Caller, Role, UnauthenticatedCaller
from rackloom.carve.api.directory import (
    CALLER_SECONDS,
    STALE_SECONDS,
    USE_SECONDS,
    Directory,
    hash_of,
    written_key,
)
from rackloom.carve.store import schema
from rackloom.carve.store.database import Store
from rackloom.carve.store.values import Rejected
from rackloom.carve.tenancy import identities
from rackloom.carve.tenancy.identities import MAX_PER_ORG, CustomRole
from rackloom.errors import Retry

TENANT, ADMIN = Role.TENANT_ADMIN, Role.PROVIDER_ADMIN


def account(api: Any, name: str = "ci", roles: Any = (TENANT,), **fields: Any) -> Any:
    return api.new("service-account", {"name": name, "roles": list(roles), **fields})


def new_key(api: Any, made: Any, **options: Any) -> str:
    return str(api.new(f"service-account/{made['id']}/key", None, **options)["key"])


def use(api: Any, key: str, path: str = "vpc", org: str = "demo") -> Any:
    return api.client.get(f"/v2/org/{org}/nico/{path}", headers={"Authorization": f"Bearer {key}"})


def test_a_program_calls_with_its_key_until_that_is_revoked(api: Any) -> None:
    made = account(api, description="builds images")
    assert made["createdBy"] == "local@demo"
    old, new = new_key(api, made), new_key(api, made)
    third = api.post(f"service-account/{made['id']}/key", None)
    assert (third.status_code, "has 2 keys already" in third.text) == (409, True)
    assert [use(api, key).status_code for key in (old, new)] == [200, 200]
    first = api.get(f"service-account/{made['id']}").json()["keys"][0]
    assert first.keys() == {"id", "created", "lastUsed"}
    assert api.delete(f"service-account/{made['id']}/key/{first['id']}").status_code == 202
    assert [use(api, key).status_code for key in (old, new)] == [401, 200]
    assert api.delete(f"service-account/{made['id']}/key/{first['id']}").status_code == 404
    assert api.delete(f"service-account/{made['id']}").status_code == 202
    assert use(api, new).json()["message"] == "Invalid authorization token in request"
    assert api.get("service-account").json() == []


def test_the_secret_is_not_recorded(api: Any) -> None:
    key = new_key(api, account(api))
    secret = key.split("_", 2)[2]
    rows = api.site.run(lambda conn: str(conn.execute(sa.select(schema.service_account_key)).all()))
    assert len(secret) == 43
    assert secret not in rows
    assert hash_of(secret) in rows


def test_a_wrong_key_opens_nothing(api: Any) -> None:
    key = new_key(api, account(api))
    _, key_id, _ = key.split("_", 2)
    for wrong in (
        key[:-1],
        f"{key}x",
        written_key(key_id, ""),
        written_key(str(uuid4()), "x"),
        "rlk_",
    ):
        assert use(api, wrong).status_code == 401, wrong
    answer = use(api, key, org="rival")
    assert (answer.status_code, answer.json()["message"]) == (
        403,
        "Failed to validate membership for org: rival",
    )


def test_an_account_does_what_its_roles_allow(api: Any) -> None:
    api.new("role", {"name": "watcher", "side": "TENANT", "permissions": ["vpcs:read"]})
    key = new_key(api, account(api, roles=["watcher"]))
    assert [use(api, key, path).status_code for path in ("vpc", "instance", "metadata")] == [200, 403, 200]
    in_use = api.delete("role/watcher")
    assert (in_use.status_code, in_use.json()["message"]) == (409, "Service Account ci has this Role")
    api.patch("role/watcher", {"permissions": ["instances:read"]})
    assert [use(api, key, path).status_code for path in ("vpc", "instance")] == [403, 200]


def test_an_account_ends(api: Any) -> None:
    ends = dt.datetime.fromtimestamp(api.site.now + 60, dt.UTC).isoformat()
    key = new_key(api, account(api, expires=ends))
    assert use(api, key).status_code == 200
    api.site.tick(60)
    assert use(api, key).json()["message"] == "The service account has expired"
    body = {"name": "late", "roles": [TENANT], "expires": ends}
    assert api.post("service-account", body).json()["data"] == {"expires": "must be later than now"}


def test_an_account_that_ends_makes_none_that_ends_later(api: Any) -> None:
    def time_in(seconds: float) -> str:
        return dt.datetime.fromtimestamp(api.site.now + seconds, dt.UTC).isoformat()

    endless = account(api, "endless")
    headers = {"Authorization": f"Bearer {new_key(api, account(api, expires=time_in(60)))}"}

    def post(path: str, body: Any = None) -> int:
        path = f"/v2/org/demo/nico/service-account{path}"
        return int(api.client.post(path, json=body, headers=headers).status_code)

    found = []
    for name, ends in (("never", None), ("later", time_in(61)), ("same", time_in(60))):
        found.append(post("", {"name": name, "roles": [TENANT], "expires": ends}))
    assert found == [403, 403, 201]
    same = next(made for made in api.get("service-account").json() if made["name"] == "same")
    assert [post(f"/{made['id']}/key") for made in (endless, same)] == [403, 201]


@pytest.mark.parametrize(
    ("roles", "status", "message"),
    [
        ([ADMIN], 403, "You do not have the permission"),
        ([TENANT, ADMIN], 403, "You do not have the permission"),
        (["nobody"], 400, "no role is called nobody"),
        ([], 400, "at least 1"),
        (["a b"], 400, "roles.0"),
    ],
)
def test_an_account_beyond_its_maker_is_refused(api: Any, roles: Any, status: int, message: str) -> None:
    answer = api.post("service-account", {"name": "ci", "roles": roles})
    assert (answer.status_code, message in answer.text) == (status, True), answer.text


def test_keys_of_a_greater_account_are_not_for_the_taking(api: Any) -> None:
    body = {"name": "operator", "roles": [ADMIN]}
    made = api.new("service-account", body, role=ADMIN)
    key = new_key(api, made, role=ADMIN)
    key_id = key.split("_")[1]
    for method, path in (("POST", "/key"), ("DELETE", f"/key/{key_id}"), ("DELETE", "")):
        answer = api.call(method, f"service-account/{made['id']}{path}")
        assert (answer.status_code, "yourself" in answer.text) == (403, True), path
    assert use(api, key, "operator-step").status_code == 200


def test_a_permission_that_no_operation_has_any_more_freezes_nothing(api: Any) -> None:
    api.new("role", {"name": "watcher", "side": "TENANT", "permissions": ["vpcs:read"]})
    made = account(api, roles=["watcher"])
    key = new_key(api, made)
    stored = sa.update(schema.custom_role).values(permissions=["moons:read", "vpcs:read"])
    api.site.run(lambda conn: conn.execute(stored))
    assert api.patch("role/watcher", {"description": "x"}).status_code == 200
    assert api.delete(f"service-account/{made['id']}/key/{key.split('_')[1]}").status_code == 202
    assert use(api, key).status_code == 401
    assert api.delete(f"service-account/{made['id']}").status_code == 202
    assert api.delete("role/watcher").status_code == 202


def test_accounts_belong_to_an_organisation(api: Any) -> None:
    made = account(api)
    assert api.get("service-account", org="rival").json() == []
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/key")):
        assert api.call(method, f"service-account/{made['id']}{path}", org="rival").status_code == 404, path


def test_an_organisation_has_so_many_and_no_more(api: Any) -> None:
    def fill(conn: sa.Connection) -> None:
        for number in range(MAX_PER_ORG):
            identities.create_account(
                conn, "demo", f"n{number}", description=None, roles=["TENANT_ADMIN"], expires=None,
                created_by="x", now=api.site.now, ids=lambda: str(uuid4()),
            )  # fmt: skip

    api.site.run(fill)
    answer = api.post("service-account", {"name": "more", "roles": [TENANT]})
    assert (answer.status_code, f"Max: {MAX_PER_ORG}" in answer.text) == (403, True)


# Replicas.


class Replica:
    """A directory over shared records, with separate clocks, that counts its reads."""

    def __init__(self, store: Store) -> None:
        self.now, self.monotonic = 1_000_000.0, 0.0
        self.reads = 0
        self.during_read: Callable[[], Awaitable[None]] | None = None
        self.store = store
        self.directory = Directory(self, lambda: self.now, BUILT_IN, lambda: self.monotonic)  # type: ignore[arg-type]

    async def read(self, work: Any) -> Any:
        self.reads += 1
        found = await self.store.read(work)
        if self.during_read is not None:
            await self.during_read()
        return found

    def on_behalf_of(self, org: str) -> Store:
        return self.store.on_behalf_of(org)


async def given_key(store: Store) -> str:
    def make(conn: sa.Connection) -> str:
        made = identities.create_account(
            conn, "demo", "ci", description=None, roles=["TENANT_ADMIN"], expires=None,
            created_by="x", now=1.0, ids=lambda: str(uuid4()),
        )  # fmt: skip
        key = identities.create_key(conn, made.id, hash_of("s"), 1.0, lambda: str(uuid4()))
        return written_key(key.id, "s")

    return await store.run(make)


def test_a_key_that_another_replica_revoked_ends_within_a_second(tmp_path: Any) -> None:
    async def scenario() -> None:
        store = Store.open(tmp_path)
        replica, key = Replica(store), await given_key(store)
        caller = await replica.directory.caller_of(key, "Demo")
        assert (caller.org, caller.roles, caller.expires) == (
            "demo",
            {TENANT},
            replica.now + CALLER_SECONDS,
        )

        def revoke(conn: sa.Connection) -> None:
            (row,) = identities.accounts_of_org(conn, "demo")
            identities.revoke_key(conn, row.id, key.split("_")[1], lambda: str(uuid4()))

        await store.run(revoke)
        replica.monotonic += STALE_SECONDS
        with pytest.raises(UnauthenticatedCaller):
            await replica.directory.caller_of(key, "demo")
        await store.close()

    asyncio.run(scenario())


def test_made_up_keys_cost_one_look_into_the_records_a_second(tmp_path: Any) -> None:
    async def scenario() -> None:
        store = Store.open(tmp_path)
        replica, key = Replica(store), await given_key(store)
        await replica.directory.caller_of(key, "demo")
        before = replica.reads
        for tick in range(10):
            replica.monotonic = tick * STALE_SECONDS
            for number in range(50):
                with pytest.raises(UnauthenticatedCaller):
                    await replica.directory.caller_of(f"rlk_{number}_x", "demo")
        assert replica.reads - before <= 10
        with pytest.raises(Rejected):
            await replica.directory.caller_of(key, "rival")
        await store.close()

    asyncio.run(scenario())


def test_changes_during_every_read_keep_no_caller_waiting(tmp_path: Any) -> None:
    async def scenario() -> None:
        store = Store.open(tmp_path)
        replica, key = Replica(store), await given_key(store)

        async def change() -> None:
            if replica.reads < 10:
                replica.directory.forget()

        replica.during_read = change
        await asyncio.gather(*(replica.directory.caller_of(key, "demo") for _ in range(20)))
        assert replica.reads == 1
        await store.close()

    asyncio.run(scenario())


def test_a_read_from_before_a_change_admits_nobody_who_came_after_it(tmp_path: Any) -> None:
    async def scenario() -> None:
        store = Store.open(tmp_path)
        replica, key = Replica(store), await given_key(store)
        has_read, may_go_on = asyncio.Event(), asyncio.Event()

        async def pause() -> None:
            has_read.set()
            await may_go_on.wait()

        def revoke(conn: sa.Connection) -> None:
            (row,) = identities.accounts_of_org(conn, "demo")
            identities.revoke_key(conn, row.id, key.split("_")[1], lambda: str(uuid4()))

        replica.during_read = pause
        before = asyncio.create_task(replica.directory.caller_of(key, "demo"))
        await has_read.wait()
        await store.run(revoke)
        replica.directory.forget()
        after = asyncio.create_task(replica.directory.caller_of(key, "demo"))
        await asyncio.sleep(0)
        may_go_on.set()
        assert (await before).roles == {TENANT}
        with pytest.raises(UnauthenticatedCaller):
            await after
        await store.close()

    asyncio.run(scenario())


def test_a_failed_read_is_shared_by_all_who_waited_for_it(tmp_path: Any) -> None:
    async def scenario() -> None:
        store = Store.open(tmp_path)
        replica, key = Replica(store), await given_key(store)

        async def fail() -> None:
            raise Retry("the database does not answer", after=1)

        replica.during_read = fail
        calls = [replica.directory.caller_of(key, "demo") for _ in range(20)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [Retry] * 20
        assert replica.reads == 1
        replica.during_read = None
        assert (await replica.directory.caller_of(key, "demo")).roles == {TENANT}
        await store.close()

    asyncio.run(scenario())


def test_who_has_a_custom_role_is_looked_up_again_after_minutes(tmp_path: Any) -> None:
    async def scenario() -> None:
        store = Store.open(tmp_path)
        replica = Replica(store)
        role = CustomRole("TENANT", frozenset({"vpcs:read"}))
        await store.run(
            lambda conn: identities.create_role(
                conn, "demo", "watcher", role, None, 1.0, lambda: str(uuid4())
            )
        )
        until = {}
        for name in ("watcher", "no-such-role"):
            caller = Caller("x", "demo", frozenset({TENANT}), replica.now + 9999, frozenset({name}))
            until[name] = (await replica.directory.with_custom_roles(caller)).expires - replica.now
        assert until == {"watcher": CALLER_SECONDS, "no-such-role": 9999}
        await store.close()

    asyncio.run(scenario())


def test_the_last_use_is_written_once_an_hour(tmp_path: Any) -> None:
    async def scenario() -> None:
        store = Store.open(tmp_path)
        replica, key = Replica(store), await given_key(store)

        async def last_used() -> Any:
            return await store.read(
                lambda conn: conn.execute(sa.select(schema.service_account_key.c.last_used)).scalar_one()
            )

        first = replica.now
        for seconds, expected in ((0, first), (USE_SECONDS - 1, first), (1, first + USE_SECONDS)):
            replica.now += seconds
            await replica.directory.caller_of(key, "demo")
            assert await last_used() == expected
        await store.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_replicas_on_postgresql_agree(postgres_url: str) -> None:
    async def scenario() -> None:
        stores = [await Store.connect(postgres_url) for _ in range(2)]
        first, second = (Replica(store) for store in stores)
        key = await given_key(stores[0])
        for replica in (first, second):
            assert (await replica.directory.caller_of(key, "demo")).roles == {TENANT}

        def another_key(conn: sa.Connection) -> None:
            (row,) = identities.accounts_of_org(conn, "demo")
            identities.create_key(conn, row.id, hash_of("t"), 1.0, lambda: str(uuid4()))

        made = await asyncio.gather(
            *(store.run(another_key) for store in stores for _ in range(3)), return_exceptions=True
        )
        assert sorted(isinstance(answer, Rejected) for answer in made) == [False] + [True] * 5

        def remove(conn: sa.Connection) -> None:
            (row,) = identities.accounts_of_org(conn, "demo")
            identities.delete_account(conn, row.id, lambda: str(uuid4()))

        await stores[1].run(remove)
        for replica in (first, second):
            replica.monotonic += STALE_SECONDS
            with pytest.raises(UnauthenticatedCaller):
                await replica.directory.caller_of(key, "demo")
        for store in stores:
            await store.close()

    asyncio.run(scenario())
