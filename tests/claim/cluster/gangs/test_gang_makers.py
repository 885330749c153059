"""The owners that the controller reads for the pods of a gang, and how often."""

import asyncio

import pytest
from tests.core.gangs.test_gang_completion import pod

from rackloom.claim.cluster.gang_placer import read_owners
from rackloom.claim.kube.api import NotFound


class Asked:
    """An API server that knows of no owner, and counts the requests."""

    def __init__(self):
        self.names = []

    async def get(self, kind, name, namespace=None):
        self.names.append((kind.kind, name))
        raise NotFound(404, "NotFound", name)


@pytest.mark.parametrize(
    ("members", "asked"),
    [
        ([pod(f"p{at}", "t0", "Succeeded", job="one") for at in range(1000)], [("Job", "one")]),
        (
            [pod("l", "t0", "Failed", job="launcher"), pod("w", "t0", "Running", job="mpi", kind="MPIJob")],
            [("Job", "launcher"), ("MPIJob", "mpi")],
        ),
        ([pod(f"p{at}", "t0", "Succeeded", job=f"job-{at}") for at in range(1000)], []),
        ([pod("p", "t0", "Running", job="one")], [("Job", "one")]),
        ([pod("p", "t0", "Running", kind=None)], []),
    ],
)
def test_the_owners_of_pods_are_asked_once_each_and_none_of_very_many(members, asked):
    api = Asked()
    assert asyncio.run(read_owners(api, "team", members)) == {}
    assert api.names == asked
