"""All checks of one picture: what does not hold, causes before consequences, the worst first."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rackloom.prove.doctor.checks.cliques import check_cliques
from rackloom.prove.doctor.checks.controllers import check_controllers
from rackloom.prove.doctor.checks.domains import check_domains
from rackloom.prove.doctor.checks.fabric import check_fabric, check_layers
from rackloom.prove.doctor.checks.identity import check_identity
from rackloom.prove.doctor.checks.nics import check_nics
from rackloom.prove.doctor.checks.partitions import check_partitions
from rackloom.prove.doctor.checks.places import check_places
from rackloom.prove.doctor.checks.slices import check_slices
from rackloom.prove.doctor.checks.spread import check_spread
from rackloom.prove.doctor.checks.transfers import check_transfers
from rackloom.prove.doctor.checks.view import View
from rackloom.prove.doctor.evidence import ClusterSeen, DaemonSeen
from rackloom.prove.doctor.findings import Finding, State
from rackloom.prove.doctor.folding import fold
from rackloom.prove.doctor.sides import both_sides
from rackloom.prove.picture.values import GpuChain, Layer, Picture


def _go_on() -> None:
    pass


def examine(
    picture: Picture,
    joined: tuple[GpuChain, ...] | None = None,
    *,
    host: Sequence[Finding] = (),
    between: Callable[[], object] = _go_on,
) -> tuple[Finding, ...]:
    """What does not hold or is unknown in `picture`; empty when all that was read is as it should be.

    A layer that was not asked adds nothing, and one that could not be read adds that it is unknown.
    `joined` are the chains of `picture`, where somebody has them already; `host` is what was found on one of
    its hosts, also what is well there. `between` is called before each check: there it may be held up.
    """
    found = both_sides(unfolded(View(picture, joined), between), host)
    return fold(one for one in found if one.state is not State.HOLDS)


def unfolded(view: View, between: Callable[[], object] = _go_on) -> tuple[Finding, ...]:
    """Every finding by itself, also what plainly follows from another: for who judges by single checks."""
    return tuple(one for one in _all(view, between) if one.state is not State.HOLDS)


def _all(view: View, between: Callable[[], object]) -> Iterator[Finding]:
    for check in _checks(view):
        between()
        yield from check


def _checks(view: View) -> Iterator[Iterable[Finding]]:
    yield check_layers(view)
    yield check_controllers(view)
    yield check_places(view)
    yield check_fabric(view)
    yield check_partitions(view)
    yield check_spread(view)
    yield check_identity(view)
    if view.can_see(Layer.CLUSTER):
        yield check_slices(view)
        yield check_cliques(view)
        yield check_domains(cluster_of(view.picture))
        yield check_nics(view)
    yield check_transfers(view)


def cluster_of(picture: Picture) -> ClusterSeen:
    """What a picture shows of ComputeDomains and the pods that use them."""
    return ClusterSeen(
        domains=picture.compute_domains,
        templates=picture.templates,
        claims=picture.claims,
        pods=picture.pods,
        daemons=tuple(
            DaemonSeen(
                domain=one.domain,
                node=one.node,
                clique=one.clique,
                meshed=one.complete,
                missing=one.missing,
            )
            for one in picture.meshes
        ),
        daemons_in=picture.daemons_in,
        cliques={one.name: one.clique for one in picture.nodes if one.clique},
    )
