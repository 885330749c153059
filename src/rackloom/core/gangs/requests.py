"""The request of a gang to the placement search (`core.place`), from the requirements of its pods.

Claims. The members of a group must claim the same, since the search counts one kind of claim per group. Two
members cannot name one ResourceClaim for devices, because its devices are on one node. IMEX channels are
not counted as devices: a node has one, so a member with a channel takes a whole tray. Requests with
adminAccess take no device.

GPUs. The number of GPUs is read from the text of the pods alone (container limits of `nvidia.com/gpu`, and
claims by the class `gpu.nvidia.com`), so that it does not change while drivers publish more or less.
Members that take a tray whole get the GPU count of the trays that fit (`whole_tray_gpus`).

Rules. kube-scheduler enforces a pod's rules on the tray to which it is pinned, so the search must know them
first:

- Node rules (nodeSelector, node affinity, tolerations) close trays to the members of a group
  (`core.gangs.trays`). All members of a group must have the same ones.
- Required podAntiAffinity by host, hard topology spread by host, and host ports keep members of two groups
  off one tray. Only two of each class of interchangeable pods are compared. If there are too many unlike
  pairs, no two members share a tray.
- Any other requirement of member pods (podAffinity other than by clique to the gang itself, anti-affinity
  by other keys than the host, spread with another skew) is refused, with the change that would help.

Trays are reserved as a whole, so a gang requests empty ones. If the requests of its pods change, a placed
gang is placed again (`is_still_requested`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import ResourceClaim
from rackloom.core.cluster import names
from rackloom.core.cluster.claims import ClaimRequest, GpuDemand, claim_request
from rackloom.core.cluster.gang_objects import (
    HOST_KEY,
    GangMember,
    NodeRequirements,
    PodConstraints,
)
from rackloom.core.cluster.objects import name_of, namespace_of
from rackloom.core.cluster.pods import CHANNEL_LABEL, GANG_LABEL, LabelSelector, PodAffinityTerm, PodSpec
from rackloom.core.cluster.scheduling import AntiAffinityTerm, selector_matches
from rackloom.core.cluster.trays import (
    Gang,
    GangGroup,
    GangPlan,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
)
from rackloom.core.gangs.slots import remaining_spec
from rackloom.core.gangs.snapshot import ClusterLists, GangSnapshot
from rackloom.core.gangs.trays import MemberClaims, SiteCache, label_keys, site_for_members, two_of_each_class
from rackloom.errors import Refused

SPLIT_GROUP_FIX = "give those that differ a group of their own (label rackloom.dev/gang-group)"

# Device claims of members.


_READ_FIX = "use the fields of resource.k8s.io/v1 that this version of rackloom knows"
ClaimSpecs = Mapping[tuple[str, str], ClaimRequest]
"""Claims by (`claim`, name) and claim templates by (`claim template`, name)."""


def claim_specs(cluster: ClusterLists, namespace: str) -> ClaimSpecs:
    """All claims and claim templates that a pod of the namespace can name."""
    return {
        (kind, name_of(obj)): claim_request(obj)
        for kind, objects in (("claim", cluster.state.claims), ("claim template", cluster.templates))
        for obj in objects
        if namespace_of(obj) == namespace
    }


def _shared_specs(snapshot: GangSnapshot, cache: SiteCache) -> ClaimSpecs:
    cluster, namespace = snapshot.cluster, snapshot.key.namespace
    return cache.shared(cluster, ("specs", namespace), lambda: claim_specs(cluster, namespace))


def _claim_spec(specs: ClaimSpecs, kind: str, name: str) -> ClaimRequest:
    if (kind, name) not in specs:
        raise Refused(f"{kind} {name} does not exist", nearest_fix="create it")
    return specs[kind, name]


class GroupClaims(msgspec.Struct, frozen=True, kw_only=True):
    """The claims of each member of a group."""

    kind: str
    """The names of the templates and claims, which identify it in the placement request."""
    claims: MemberClaims


def group_claims(group: Iterable[GangMember], specs: ClaimSpecs) -> GroupClaims | None:
    """The claims of each member of a group. None if they claim nothing, so that any tray serves them.

    Raises Refused if they differ, if two name one claim, or for a claim that cannot be read.
    """
    members = tuple(group)
    # The devices of a claim are on one node, so all pods that share it would have to go to that node.
    seen: set[str] = set()
    for name in (name for member in members for name in member.pod.named_claims):
        if name in seen and _claim_spec(specs, "claim", name).takes_devices:
            fix = "use resourceClaimTemplateName, which makes a claim for each pod"
            raise Refused(f"claim {name} is named by several members", nearest_fix=fix)
        seen.add(name)
    found: list[GroupClaims] = []
    for member in members:
        named = {name: _claim_spec(specs, "claim template", name) for name in member.pod.templates}
        named |= {f"claim {name}": _claim_spec(specs, "claim", name) for name in member.pod.named_claims}
        claims = {
            name: _read_claim(name, request) for name, request in named.items() if request.takes_devices
        }
        if claims:
            found.append(GroupClaims(kind="+".join(claims), claims=tuple(claims.values())))
    # Claims of other names may have the same requests, so their specs are compared.
    for claimed in found[1:]:
        if [claim.spec for claim in claimed.claims] != [claim.spec for claim in found[0].claims]:
            reason = f"members of one group claim {found[0].kind} and {claimed.kind}"
            raise Refused(reason, nearest_fix=SPLIT_GROUP_FIX)
    return found[0] if found else None


def _read_claim(name: str, request: ClaimRequest) -> ResourceClaim:
    try:
        return request.claim(name)
    except msgspec.ValidationError as error:
        raise Refused(f"what {name} claims cannot be read: {error}", nearest_fix=_READ_FIX) from error


def claim_gpus(kinds: Mapping[str, MemberClaims]) -> bool:
    """Whether members claim GPUs, by the class `gpu.nvidia.com`. Other members' GPUs count by limits."""
    requests = (
        request for claims in kinds.values() for claim in claims for request in claim.spec.devices.requests
    )
    wanted = (request.exactly or next(iter(request.first_available), None) for request in requests)
    return any(request is not None and request.device_class_name == names.GPU_DRIVER for request in wanted)


# GPUs of members, and the size of a tray that a member takes whole.


def member_demand(member: GangMember, specs: ClaimSpecs) -> GpuDemand:
    """The GPUs that a pod requests. Raises Refused for a claim or a template that does not exist.

    Channels that it shares with other pods (in channel mode) do not count.
    """
    if member.class_resources:
        fix = "name a ResourceClaimTemplate in spec.resourceClaims instead"
        reason = f"pod {member.name} asks for {member.class_resources[0]}, which is not counted for gangs"
        raise Refused(reason, nearest_fix=fix)
    templates = (_claim_spec(specs, "claim template", name) for name in member.pod.templates)
    claims = (_claim_spec(specs, "claim", name) for name in member.pod.named_claims)
    claimed = (*templates, *(claim for claim in claims if claim.takes_devices))
    return sum((request.demand for request in claimed), GpuDemand(member.gpus))


def group_demand(members: Iterable[GangMember], specs: ClaimSpecs) -> GpuDemand:
    """The request of each member of a group: the largest of any. Raises Refused."""
    demands = [member_demand(member, specs) for member in members]
    return GpuDemand(
        max((demand.gpus for demand in demands), default=0), any(demand.whole for demand in demands)
    )


def whole_tray_gpus(
    trays: Sequence[PlacementTray], members: int, gpus: int, taken: Collection[str] = ()
) -> int:
    """GPUs of the tray that a member takes whole: `members` share a clique, and each counts `gpus`.

    The result is the GPU count of the largest trays of one clique, as many as there are members. The clique
    is chosen in this order: its trays have at least `gpus`, it has enough trays, they are of equal size, and
    they are small. A larger tray elsewhere therefore never keeps a gang from a clique where it fits. Trays
    `taken` by others are left out if enough remain. Nodes without a clique (no NVLink fabric) have no
    channels, and count only if no open tray has a clique.
    """
    opened = [tray for tray in trays if tray.shut is None]
    candidates = [tray for tray in opened if tray.clique is not None] or opened or trays
    free = _best_clique([tray for tray in candidates if tray.name not in taken], members, gpus)
    is_enough = len(free) == members and free[-1] >= gpus
    return min(free if is_enough else _best_clique(candidates, members, gpus), default=0)


def _best_clique(trays: Iterable[PlacementTray], members: int, gpus: int) -> list[int]:
    """The GPU counts of the largest trays of the best clique, as many as there are members, largest first."""
    sizes_by_clique: dict[str, list[int]] = {}
    for tray in trays:
        sizes_by_clique.setdefault(tray.clique or tray.name, []).append(tray.gpus)
    largest = (sorted(sizes, reverse=True)[:members] for sizes in sizes_by_clique.values())
    # In order: enough GPUs, enough trays, equal trays, small trays.
    return min(
        largest,
        key=lambda sizes: (sizes[-1] < gpus, -len(sizes), sizes[0] != sizes[-1], sizes[-1]),
        default=[],
    )


# Constraints by which no gang can be placed.


_OWN_LABELS = (GANG_LABEL, CHANNEL_LABEL, "batch.kubernetes.io/job-name", "job-name")
"""Labels with a value that only pods of one gang have: those of the gang, its ComputeDomain and its Job."""


def check_terms(members: Sequence[GangMember], clique_label: str, *, is_together: bool) -> None:
    """Raise Refused, with the fix, for rules that cannot be kept, or that differ in a group.

    `is_together`: the whole gang is in one clique.
    """
    known: list[object] = []
    for member in members:
        spec = member.pod.spec
        # Most pods of a job have the same rules, so each set of rules is checked once.
        if (rules := (spec.near, spec.apart, spec.hard_spread)) in known:
            continue
        known.append(rules)
        near = _unsupported_affinity(spec, clique_label if is_together else None, members)
        for why, fix in (*near, *_unsupported_rules(spec)):
            raise Refused(f"pod {member.name} requires {why}, which gangs are not placed by", nearest_fix=fix)
    for group in dict.fromkeys(member.group for member in members):
        _shared_requirements([member for member in members if member.group == group])


def _unsupported_affinity(
    spec: PodSpec, clique_label: str | None, members: Sequence[GangMember]
) -> Iterator[tuple[str, str]]:
    """`clique_label` is None for a gang in segments: the search decides which members share a clique."""
    for term in spec.near:
        key = term.topology_key
        if clique_label is None:
            fix = "take the term out: members of a segment share a clique without it"
            yield f"podAffinity by {key}", fix
        elif key != clique_label:
            yield f"podAffinity by {key}", "take the term out, or prefer it instead"
        elif not _selects_gang_only(term, members):
            fix = f"take the term out, as a gang is in one clique without it, or select by label {GANG_LABEL}"
            yield f"podAffinity by {key} to pods that are not of the gang alone", fix


def _selects_gang_only(term: PodAffinityTerm, members: Sequence[GangMember]) -> bool:
    """Whether it selects members and no other pods: the search does not know the positions of other pods."""
    labels, selector = members[0].pod.labels, term.label_selector or LabelSelector()
    named = selector.match_labels or {}
    owned = any(key in named and named[key] == labels.get(key) for key in _OWN_LABELS)
    inside = term.namespace_selector is None and set(term.namespaces or ()) <= {members[0].namespace}
    return owned and inside and any(selector_matches(selector, member.pod.labels) for member in members)


def _unsupported_rules(spec: PodSpec) -> Iterator[tuple[str, str]]:
    for term in spec.apart:
        if term.topology_key != HOST_KEY:
            fix = f"use topologyKey {HOST_KEY}, or prefer the term instead"
            yield f"podAntiAffinity by {term.topology_key}", fix
        elif _by_namespace(term) or term.match_label_keys or term.mismatch_label_keys:
            fix = "use labelSelector and namespaces alone"
            yield "podAntiAffinity with namespaceSelector, matchLabelKeys or mismatchLabelKeys", fix
    for spread in spec.hard_spread:
        if spread.topology_key != HOST_KEY or spread.max_skew != 1:
            fix = f"use ScheduleAnyway, or {HOST_KEY} with maxSkew 1: one member on a tray"
            yield f"topologySpreadConstraints by {spread.topology_key} with maxSkew {spread.max_skew}", fix


def _by_namespace(term: PodAffinityTerm) -> bool:
    """An empty namespaceSelector selects all namespaces, which `PodIdentity` knows."""
    return term.namespace_selector not in (None, LabelSelector())


# The terms of each group.


_MOST_PAIRS = 1 << 16
"""Pairs of different members that are compared. With more, no two members share a tray."""


def group_terms(groups: Mapping[str, Sequence[GangMember]]) -> dict[str, PlacementTerms | None]:
    """The terms of each group, or None for a group without terms. Raises Refused if its members differ."""
    by_group = {name: [_member_constraints(member) for member in members] for name, members in groups.items()}
    read = set(label_keys(pod for pods in by_group.values() for pod in pods))
    classes = {name: two_of_each_class(pods, read) for name, pods in by_group.items()}
    found: dict[str, PlacementTerms | None] = {}
    for name, mine in classes.items():
        where, apart = _shared_requirements(groups[name]).text, list[str]()
        # The groups, perhaps this one, with a member that may not share a tray with one of this group. If
        # there are too many unlike pairs to compare, keeping all of them apart is safe.
        for other, theirs in classes.items():
            pairs = combinations(mine, 2) if name == other else product(mine, theirs)
            is_too_many = len(mine) * len(theirs) > _MOST_PAIRS
            if is_too_many or any(True for pod, another in pairs for _ in pod.barred_by(another)):
                apart.append(other)
        # Without terms the search stays on its counting path.
        terms = PlacementTerms(where=where, likeness=name if apart else "", apart=tuple(apart))
        found[name] = terms if where or apart else None
    return found


def pod_terms(member: GangMember) -> PlacementTerms:
    """The node rules of one pod, including its pin once it was ungated."""
    return PlacementTerms(where=member.node_rules.text)


def _shared_requirements(group: Sequence[GangMember]) -> NodeRequirements:
    """The node rules of all members of a group. Raises Refused if they differ or make no sense."""
    where = group[0].node_rules if group else NodeRequirements()
    first = group[0].pod.spec if group else PodSpec()
    alike = (first.node_selector, first.affinity, first.tolerations)
    # Most pods of a group are written alike. Only the rules of the others are read and compared.
    for member in group[1:]:
        spec = member.pod.spec
        if (spec.node_selector, spec.affinity, spec.tolerations) != alike and member.node_rules != where:
            reason = f"{group[0].name} and {member.name} of one group may not go to the same nodes"
            raise Refused(f"{reason} (nodeSelector, node affinity, tolerations)", nearest_fix=SPLIT_GROUP_FIX)
    return where


def _member_constraints(member: GangMember) -> PodConstraints:
    """The constraints of a member. A spread with maxSkew 1 becomes anti-affinity: one member per node."""
    constraints = member.constraints
    spread = (
        AntiAffinityTerm(selector=term.label_selector, namespaces=(), everywhere=False)
        for term in member.pod.spec.hard_spread
    )
    identity = replace(constraints.identity, apart=(*constraints.identity.apart, *spread))
    return replace(constraints, identity=identity)


# From the pods of a gang to the request.


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A gang as the placement search takes it."""

    gang: Gang
    kinds: Mapping[str, MemberClaims]
    """The claims of each member, by `GangGroup.devices`."""
    whole: Mapping[str, int]
    """Groups with members that take a tray each, and the GPUs that each member counts."""
    site: PlacementSite
    """The site as the members can use it, still without room for claims."""


def placement_request(snapshot: GangSnapshot, cache: SiteCache) -> PlacementRequest:
    """The request of a gang, from its pods. Its trays are reserved whole (`exclusive`). Raises Refused."""
    declared = remaining_spec(snapshot)
    # Each group: its rules for trays, the GPUs of a member, and the claims of a member.
    specs = _shared_specs(snapshot, cache)
    members = {name: _group_members(snapshot, name) for name, _ in declared.sizes}
    terms = group_terms(members)
    demands = {name: group_demand(group, specs) for name, group in members.items()}
    claims = {name: group_claims(group, specs) for name, group in members.items()}
    kinds = {claimed.kind: claimed.claims for claimed in claims.values() if claimed is not None}
    site = site_for_members(snapshot, terms.values(), cache, claimed=claim_gpus(kinds))
    # A member with an IMEX channel takes a tray whole, so it counts all GPUs of the trays that fit. Trays
    # that are closed to such members, or that others hold, do not show the size.
    whole_gpus, together = 0, sum(size for name, size in declared.sizes if demands[name].whole)
    if together:
        of_whole = (terms[name] for name, demand in demands.items() if demand.whole)
        wheres = {term.where for term in of_whole if term is not None}
        usable = [
            replace(tray, shut=tray.shut or "closed") if wheres & tray.closed.keys() else tray
            for tray in site.trays
        ]
        taken = {hold.tray for hold in site.holds if hold.owner != snapshot.key.full_name}
        if declared.segment is not None:
            together = min(declared.segment, together)
        most = max((demand.gpus for demand in demands.values()), default=0)
        whole_gpus = whole_tray_gpus(usable, together, most, taken)
    # A member of a whole tray counts all GPUs of the tray, so the search puts no second member there.
    groups = []
    for name, size in declared.sizes:
        claimed, demand = claims[name], demands[name]
        gpus = max(demand.gpus, whole_gpus) if demand.whole else demand.gpus
        devices = None if claimed is None else claimed.kind
        groups.append(GangGroup(name=name, members=size, gpus=gpus, devices=devices, terms=terms[name]))
    gang = Gang(
        name=snapshot.key.full_name,
        groups=tuple(groups),
        priority=max((member.pod.spec.priority or 0 for member in snapshot.living), default=0),
        segment=declared.segment,
        spares=declared.spares,
        exclusive=True,
    )
    whole = {name: demand.gpus for name, demand in demands.items() if demand.whole}
    return PlacementRequest(gang=gang, kinds=kinds, whole=whole, site=site)


def is_still_requested(request: PlacementRequest, recorded: Gang, plan: GangPlan) -> bool:
    """Whether a gang still has the requests of its plan: its pods may have been recreated.

    The GPU count of a whole tray may differ by now, since there are other trays. The recorded count stands.
    """
    recorded_gpus, groups = {group.name: group.gpus for group in recorded.groups}, []
    for group in request.gang.groups:
        gpus = recorded_gpus.get(group.name, 0)
        is_enough = group.name in request.whole and gpus >= max(request.whole[group.name], 1)
        groups.append(replace(group, gpus=gpus) if is_enough else group)
    # The priority decides which gang yields, not the trays that it may use.
    asked = replace(request.gang, groups=tuple(groups), priority=recorded.priority)
    per_tray = Counter(slot.tray for slot in plan.seats if slot.group in request.whole)
    return asked == recorded and all(members == 1 for members in per_tray.values())


def claims_by_kind(snapshot: GangSnapshot, gang: Gang, cache: SiteCache) -> dict[str, MemberClaims]:
    """The claims of each member of a placed gang, by the kinds of its record. Raises Refused."""
    specs = _shared_specs(snapshot, cache)
    kinds = {}
    for group in gang.groups:
        if group.devices is not None:
            claimed = group_claims(_group_members(snapshot, group.name), specs)
            if claimed is not None:
                kinds[group.devices] = claimed.claims
    return kinds


def _group_members(snapshot: GangSnapshot, name: str) -> tuple[GangMember, ...]:
    members = (member for member in snapshot.living if member.group == name)
    return tuple(sorted(members, key=lambda member: member.rank))
