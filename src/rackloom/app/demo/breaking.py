"""The demo's accident: a GPU falls off its bus under a running job, and only the doctor sees both sides."""

import time

from rackloom.app.demo.story import Evidence, NotSeen
from rackloom.app.demo.working import NAMESPACE, until
from rackloom.app.picture.look import site_picture
from rackloom.app.whole.site import Whole
from rackloom.claim.kube.kinds import POD
from rackloom.prove.doctor.examine import examine
from rackloom.prove.doctor.findings import Finding

_MODULE = 3
"""Which GPU of the tray is lost, by its NVLink module, which counts from 1; devices count from 0."""
_WORKER = "whole-rack-worker-7"


class Accident:
    """One GPU of a worker's tray."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole
        self._node = ""

    async def look_well(self) -> Evidence:
        """Before and after, the doctor has nothing to say of any layer."""
        await until(self._is_quiet, "the doctor still finds something")
        return {"findings": 0, "layers": "switch controllers, site records, cluster"}

    async def happen(self) -> Evidence:
        """The switch still counts the GPU and the claim holds it; the node does not have it any more."""
        pod = await self._whole.api.get(POD, _WORKER, NAMESPACE)
        self._node = pod["spec"]["nodeName"]
        self._whole.nodes[self._node].gpus.lose(_MODULE)
        await self._whole.nodes.look(self._node)
        return {"lost": f"the GPU of NVLink module {_MODULE} of node {self._node}, under {_WORKER}"}

    async def be_found(self) -> Evidence:
        """The doctor names the node, what both sides say, and what to do."""
        found = await until(self._findings, "the doctor finds nothing")
        about = [one for one in found if self._node in " ".join((one.subject, one.message, *one.evidence))]
        if not about:
            raise NotSeen("no finding names the node", found=[one.message for one in found])
        return {one.check: _told(one) for one in about}

    async def be_healed(self) -> Evidence:
        """The GPU answers again, as after the reboot that the fix asks for, and the doctor is content."""
        self._whole.nodes[self._node].gpus.find(_MODULE)
        await self._whole.nodes.look(self._node)
        return {"simulated": "the GPU answers again, as after a reboot", **await self.look_well()}

    async def _findings(self) -> tuple[Finding, ...]:
        site = self._whole.site
        return examine(await site_picture(time.time(), records=site.store, cluster=self._whole.api))

    async def _is_quiet(self) -> bool:
        return not await self._findings()


def _told(finding: Finding) -> Evidence:
    return {
        "what": f"{finding.subject}: {finding.message}",
        "evidence": "; ".join(finding.evidence),
        "fix": finding.fix,
    }
