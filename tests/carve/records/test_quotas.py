"""Quotas hold for creates that run side by side, on both databases."""

import asyncio
from typing import Any

from rackloom.carve.store.values import Rejected
from rackloom.carve.tenancy import entitlements, logical_partitions
from rackloom.carve.tenancy.entitlements import QuotaKind


def test_creates_side_by_side_do_not_exceed_a_quota_together(small_site: Any) -> None:
    site = small_site
    site.run(entitlements.set_quotas, site.tenant.id, {QuotaKind.LOGICAL_PARTITIONS: 3}, site.now)

    async def create(number: int) -> Any:
        return await site.store.on_behalf_of(f"org {number % 3}").run(
            logical_partitions.create_logical_partition,
            site.tenant.id,
            logical_partitions.NewLogicalPartition(site.site_id, f"partition {number}"),
            now=site.now,
            ids=lambda: f"{number:08}-0000-4000-8000-000000000000",
        )

    async def everybody() -> list[Any]:
        return await asyncio.gather(*(create(number) for number in range(9)), return_exceptions=True)

    outcomes = site.runner.run(everybody())
    assert sum(isinstance(outcome, str) for outcome in outcomes) == 3
    assert sum(isinstance(outcome, Rejected) for outcome in outcomes) == 6
    (usage, *_) = site.read(entitlements.quotas_of_tenant, site.tenant.id, site.now)
    assert (usage.limit, usage.used) == (3, 3)
