"""Answers the questions of the API server from what is known of the cluster."""

import msgspec

from rackloom.claim.cluster.admission.device_configs import review_claim
from rackloom.claim.cluster.admission.gang import hold
from rackloom.claim.cluster.admission.modes import Mode
from rackloom.claim.cluster.admission.pods import admit, review_uses
from rackloom.claim.cluster.admission.reviews import Request, Verdict
from rackloom.claim.cluster.admission.shapes import Pod, read
from rackloom.claim.cluster.admission.surroundings import Known
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE, DEFAULT_NAMESPACE
from rackloom.claim.domain.isolation import Isolation
from rackloom.claim.kube.api import KubeError
from rackloom.errors import Refused

_SYSTEM = "kube-system"


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator chooses for admission."""

    namespace: str = DEFAULT_NAMESPACE
    """Of our programs: the certificate is kept there."""
    daemon_namespace: str = DEFAULT_DAEMON_NAMESPACE
    """Of IMEX daemons. Nothing in the two namespaces is changed or refused, nor in kube-system."""
    mode: Mode = Mode.WARN
    isolation: Isolation = Isolation.DOMAIN
    """Of ComputeDomains that do not carry the isolation label, as the controller has it."""


class Desk:
    """One method per path. All raise Refused for a question that the API server would not ask there."""

    def __init__(self, known: Known, settings: AdmissionSettings) -> None:
        self._known = known
        self._settings = settings

    async def validate_claims(self, request: Request) -> Verdict:
        """Judge the opaque configs of a claim or a template."""
        return review_claim(request, self._settings.mode) if self._is_in_scope(request) else Verdict()

    async def validate_pods(self, request: Request) -> Verdict:
        """Judge whether a new pod uses what it claims."""
        pod = self._new_pod(request)
        return Verdict() if pod is None else review_uses(pod, self._settings.mode)

    async def mutate_pods(self, request: Request) -> Verdict:
        """Hold a new pod of a gang, and bring the claims of a pod together as they should."""
        pod = self._new_pod(request)
        if pod is None:
            return Verdict()
        pod, held = hold(pod)
        if not held.allowed or not pod.templates:
            return held
        try:
            return held.and_then(admit(pod, await self._known.around(request.namespace, pod)))
        except KubeError as error:
            why = f"whether the pod claims an IMEX channel could not be found out: {error.message}; try again"
            return Verdict(allowed=False, code=503, message=why)

    def _new_pod(self, request: Request) -> Pod | None:
        if request.resource.resource != "pods":
            raise Refused(f"asked about {request.resource.resource!r}, not pods")
        if request.operation != "CREATE" or not self._is_in_scope(request):
            return None
        return read(request.object, Pod)

    def _is_in_scope(self, request: Request) -> bool:
        return request.namespace not in (_SYSTEM, self._settings.namespace, self._settings.daemon_namespace)
