"""A tenant writes the claim by hand while the ComputeDomain waits for quota."""
import asyncio

from rackloom.core.domains.names import ImexMode
from rackloom.core.kubernetes.objects import COMPUTE_DOMAIN


def test_no_channel_of_a_host_without_quota(imex, monkeypatch):
    tools = imex.root / "bin"
    tools.mkdir()
    (tools / "chroot").write_text("#!/bin/sh\necho READY\n")
    (tools / "chroot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")

    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        api = imex.kit.api
        (cd,) = [item for item in (await api.list(COMPUTE_DOMAIN)).items if item["metadata"]["uid"] == uid]
        waits = {"type": "QuotaReserved", "status": "False", "reason": "WaitingForQuota",
                 "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        await api.patch(COMPUTE_DOMAIN, cd["metadata"]["name"], cd["metadata"]["namespace"],
                        {"status": {"status": "NotReady", "nodes": [], "conditions": [waits]}}, subresource="status")
        claim = await imex.channel("work", uid)
        async with imex.kit.plugin(imex.plugin(mode=ImexMode.HOST_MANAGED)) as running:
            (answer,) = (await running.requests.prepare([claim.ref], 30.0)).values()
            assert answer.error != ""

    asyncio.run(story())
