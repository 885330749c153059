"""RPCs about reserved trays, through a real server."""

import sqlalchemy as sa
from tests.carve.admin.admin_site import Code

from rackloom.carve.admin import operator_pb2 as ours
from rackloom.carve.store.schema import audit_entry


def test_an_operator_reserves_lists_and_frees_trays(small_site, run_on_site):
    small_site.observe_all()

    async def scenario(admin):
        rpc = admin.operator
        order = ours.TrayReservationOrder(
            tenant_organization_id="Demo", reason="a planned job", machine_ids=["chassis0-0"]
        )
        order.until.FromMicroseconds(int((small_site.now + 100) * 1e6))
        made = await rpc.CreateTrayReservation(order)
        assert (made.tenant_organization_id, made.is_active, made.asked_by) == ("demo", True, "admin")
        assert list(made.machine_ids) == ["chassis0-0"]
        assert (await admin.refused(rpc.CreateTrayReservation(order)))[0] is Code.FAILED_PRECONDITION
        order.count = 2
        assert (await admin.refused(rpc.CreateTrayReservation(order)))[0] is Code.INVALID_ARGUMENT
        del order.machine_ids[:]
        order.instance_type_id, order.count = small_site.type_id, 4097
        assert (await admin.refused(rpc.CreateTrayReservation(order)))[0] is Code.INVALID_ARGUMENT
        order.tenant_organization_id = "nobody"
        assert (await admin.refused(rpc.CreateTrayReservation(order)))[0] is Code.NOT_FOUND
        listed = await rpc.ListTrayReservations(ours.TrayReservationsRequest(tenant_organization_id="demo"))
        assert list(listed.reservations) == [made]
        other = ours.TrayReservationsRequest(tenant_organization_id="rival")
        assert not (await rpc.ListTrayReservations(other)).reservations
        deletion = ours.TrayReservationDeletion(id=made.id, reason="cancelled")
        await rpc.DeleteTrayReservation(deletion)
        assert (await admin.refused(rpc.DeleteTrayReservation(deletion)))[0] is Code.NOT_FOUND
        assert not (await rpc.ListTrayReservations(ours.TrayReservationsRequest())).reservations
        rows = sa.select(audit_entry).order_by(audit_entry.c.id)
        created, deleted = await admin.site.store.read(lambda conn: conn.execute(rows).all())
        assert [entry.object_id for entry in (created, deleted)] == [made.id, made.id]
        assert [entry.tenant_org for entry in (created, deleted)] == ["demo", "demo"]
        assert [entry.reason for entry in (created, deleted)] == ["a planned job", "cancelled"]

    run_on_site(scenario)
