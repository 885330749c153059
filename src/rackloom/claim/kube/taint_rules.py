"""The DeviceTaintRules of a cluster, in whatever version its API server serves them, if it does.

A server that does not serve a version answers 404 (`NotFound`). Then there are no rules in that version,
which is no error: a list asks for the next version, an informer asks again now and then.
"""

import random
from collections.abc import Awaitable, Callable, Mapping

from rackloom.claim.kube.api import KubeApi, NotFound, ObjectList
from rackloom.claim.kube.informer import Informer, is_not_served
from rackloom.core.cluster.objects import DEVICE_TAINT_RULES, Object, ResourceKind


async def list_taint_rules(
    list_kind: Callable[[ResourceKind], Awaitable[ObjectList]],
) -> tuple[Object, ...]:
    """All rules, of the first version that is served; none where none is. Raises KubeError of `list_kind`."""
    for kind in DEVICE_TAINT_RULES:
        try:
            return (await list_kind(kind)).items
        except NotFound:
            continue
    return ()


def taint_rule_informers(api: KubeApi, rng: random.Random) -> Mapping[ResourceKind, tuple[Informer, ...]]:
    """An informer of each version. A rule is in the cache of every version that is served."""
    return {kind: (Informer(api, kind, excuses=is_not_served, rng=rng),) for kind in DEVICE_TAINT_RULES}
