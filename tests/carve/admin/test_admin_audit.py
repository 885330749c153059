"""Every call of the admin interface that may change something leaves an entry in the audit log."""

import msgspec
import pytest
import sqlalchemy as sa
from tests.carve.admin.admin_site import D0, Code

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.admin.audit import SUBJECTS
from rackloom.carve.admin.server import RPCS, AccessClass
from rackloom.carve.store.audit_trail import RequestAudit
from rackloom.carve.store.schema import audit_entry


async def entries(admin, **wanted):
    query = sa.select(audit_entry).order_by(audit_entry.c.id)
    for name, value in wanted.items():
        query = query.where(audit_entry.c[name] == value)
    return await admin.site.store.read(lambda conn: conn.execute(query).all())


def test_every_rpc_that_changes_something_says_what_it_is_about():
    changing = {
        name for rpcs in RPCS.values() for name, rpc in rpcs.items() if rpc.access is AccessClass.ADMIN
    }
    assert changing == SUBJECTS.keys()
    for rpcs in RPCS.values():
        for name, rpc in rpcs.items():
            if name in SUBJECTS:
                assert SUBJECTS[name](rpc.request()).kind, name


def test_a_step_of_an_operator_is_entered_with_certificate_address_and_reason(small_site, run_on_site):
    small_site.observe_all()

    async def scenario(admin):
        await admin.operator.PauseDomain(ours.DomainRequest(domain=D0, reason="firmware"))
        (entry,) = await entries(admin)
        assert (entry.channel, entry.subject, entry.org) == ("admin", "admin", "")
        assert entry.source in ("127.0.0.1", "::1")
        assert (entry.object_kind, entry.object_id, entry.reason) == ("nvlink-domain", D0, "firmware")
        assert (entry.operation, entry.status, entry.code) == ("PauseDomain", 200, "OK")
        assert entry.fields == ["domain", "reason"]
        assert entry.tenant_org is None

    run_on_site(scenario)


def test_what_happens_to_the_object_of_a_tenant_is_for_that_tenant(small_site, run_on_site):
    small_site.observe_all()

    async def scenario(admin):
        made = await admin.partition("theirs")
        instance = await admin.instance("vm")
        await admin.forge.ReleaseInstance(pb.InstanceReleaseRequest(id=ids_pb.InstanceId(value=instance)))
        created, released = await entries(admin)
        assert (created.object_id, created.object_name) == (made.id.value, "theirs")
        assert (released.object_id, released.object_name) == (instance, "vm")
        assert [entry.tenant_org for entry in (created, released)] == ["demo", "demo"]
        assert all(entry.by_operator for entry in (created, released))

    run_on_site(scenario)


def test_a_drained_tray_concerns_the_tenant_on_it(small_site, run_on_site):
    small_site.observe_all()

    async def scenario(admin):
        instance = await admin.instance("vm")
        row = await admin.forge.FindInstancesByIds(
            pb.InstancesByIdsRequest(instance_ids=[ids_pb.InstanceId(value=instance)])
        )
        machine = row.instances[0].machine_id.id
        await admin.operator.DrainTray(ours.TrayRequest(machine_id=machine, reason="fan"))
        (entry,) = await entries(admin, operation="DrainTray")
        assert (entry.object_kind, entry.object_id, entry.tenant_org) == ("machine", machine, "demo")

    run_on_site(scenario)


def test_a_credential_is_entered_without_it(small_site, run_on_site):
    async def scenario(admin):
        request = pb.CredentialCreationRequest(
            credential_type=pb.NmxM, username="rw-user", password="open sesame"
        )
        await admin.forge.CreateCredential(request)
        (entry,) = await entries(admin)
        assert (entry.operation, entry.object_kind) == ("CreateCredential", "credential")
        assert "password" in entry.fields
        assert "sesame" not in repr(entry)
        assert "rw-user" not in repr(entry)

    run_on_site(scenario)


def test_a_refused_call_is_counted_and_changes_nothing(small_site, run_on_site):
    small_site.observe_all()
    audit = RequestAudit()

    async def scenario(admin):
        missing = ours.DomainRequest(domain="nowhere", reason="typo")
        assert (await admin.refused(admin.operator.PauseDomain(missing)))[0] is Code.NOT_FOUND
        assert await entries(admin) == []
        (refused,) = audit.due(small_site.now)
        assert (refused.sample.operation, refused.sample.status, refused.sample.code) == (
            "PauseDomain", 404, "NOT_FOUND",
        )  # fmt: skip
        assert refused.sample.message

    run_on_site(scenario, audit=audit)


def test_a_certificate_that_may_not_call_is_counted(small_site, admin_server, refusal):
    audit = RequestAudit()

    async def scenario():
        given = admin_server.deps(small_site.store, audit=audit)
        async with admin_server.open(given), admin_server.client("stranger") as client:
            await refusal(client.operator.ShowDomains(ours.DomainsRequest()))
            await refusal(client.operator.PauseDomain(ours.DomainRequest(domain=D0)))

    small_site.runner.run(scenario())
    found = {(due.sample.subject, due.sample.operation, due.sample.status) for due in audit.due(0.0)}
    assert found == {("stranger", "ShowDomains", 403), ("stranger", "PauseDomain", 403)}


def test_the_export_gives_each_entry_once(small_site, run_on_site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rackloom.carve.admin.audit.PART", 2)

    async def scenario(admin):
        for number in range(5):
            await admin.partition(f"p{number}")
        names, after = [], 0
        while True:
            reply = await admin.operator.ExportAuditEntries(ours.AuditExportRequest(after=after))
            if not reply.last:
                break
            names += [msgspec.json.decode(line)["object_name"] for line in reply.entries]
            after = reply.last
        assert names == [f"p{number}" for number in range(5)]

    run_on_site(scenario)
