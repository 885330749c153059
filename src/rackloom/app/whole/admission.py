"""The admission webhook inside the twin's API server: the same desk and gatekeeper, asked by a call."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from rackloom.claim.cluster.admission.desk import AdmissionSettings, Desk
from rackloom.claim.cluster.admission.gatekeeper import Gatekeeper
from rackloom.claim.cluster.admission.reviews import Request, Resource, Verdict
from rackloom.claim.cluster.admission.serving import NAME
from rackloom.claim.cluster.admission.surroundings import Known
from rackloom.claim.kube.api import KubeApi, Object, Rejected
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.kinds import POD, RESOURCE_CLAIM, RESOURCE_CLAIM_TEMPLATE
from rackloom.twin.kube import FakeKube, Review
from rackloom.twin.kube.patches import json_patch

Question = Callable[[Request], Awaitable[Verdict]]


class Admission:
    """What deploy/kubernetes/webhook installs. `run` keeps it informed, and opens the gates of pods."""

    def __init__(self, kube: FakeKube, api: KubeApi, wall: Callable[[], float], rng: random.Random) -> None:
        settings = AdmissionSettings()
        self._known = Known(api, settings.isolation, rng)
        self._gatekeeper = Gatekeeper(api, self._known, Recorder(api, NAME, "twin", wall), rng)
        self._desk = Desk(self._known, settings)
        kube.admission.append(self.review)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self._known.informers:
                tasks.create_task(informer.run())
            tasks.create_task(self._gatekeeper.run())

    async def review(self, review: Review) -> Object | None:
        """The object as it is let in. Raises `Rejected`."""
        obj = review.object
        if obj is None or review.subresource:
            return None
        for ask in self._questions(review):
            verdict = await ask(_request(review, obj))
            if not verdict.allowed:
                why = f'admission webhook "{NAME}" denied the request: {verdict.message}'
                raise Rejected(verdict.code, "Invalid", why)
            if verdict.patch:
                obj = json_patch(obj, list(verdict.patch))
        return obj

    def _questions(self, review: Review) -> tuple[Question, ...]:
        """Those that the webhook configurations register, changes first."""
        if review.kind == POD and review.operation == "CREATE":
            return self._desk.mutate_pods, self._desk.validate_pods
        if review.kind in (RESOURCE_CLAIM, RESOURCE_CLAIM_TEMPLATE):
            return (self._desk.validate_claims,)
        return ()


def _request(review: Review, obj: Object) -> Request:
    kind = review.kind
    return Request(
        uid="",
        operation=review.operation,
        resource=Resource(kind.group, kind.version, kind.plural),
        namespace=obj["metadata"].get("namespace", ""),
        object=obj,
        old_object=review.old,
    )
