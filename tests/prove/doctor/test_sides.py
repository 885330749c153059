"""What two sides say of one thing is one finding, and nothing that either says is lost."""

from hypothesis import given
from hypothesis import strategies as st

from rackloom.prove.doctor import names
from rackloom.prove.doctor.findings import Severity, fails, holds, unknown
from rackloom.prove.doctor.sides import both_sides

NIC, OTHER, NODE = "device n/nic-0", "device n/nic-1", "node n"


def down(side, *where, severity=Severity.WARNING):
    return fails(
        names.NIC_LINK,
        f"NIC of {side}",
        "down",
        "fix",
        severity=severity,
        evidence=(f"{side}: down",),
        where=where,
    )


def test_the_worse_counts_under_the_clusters_name_for_it():
    cluster = unknown(
        names.NIC_LINK, "NIC n/nic-0", "not told", "fix", evidence=("slice: -",), where=(NIC, NODE)
    )
    (one,) = both_sides([cluster], [down("host", NIC, NODE)])
    assert (one.subject, one.message, one.severity) == ("NIC n/nic-0", "down", Severity.WARNING)
    assert one.evidence == ("slice: -", "host: down")


def test_what_is_well_on_the_host_stands_beside_what_its_cluster_says():
    well = holds(names.NIC_LINK, "NIC of host", "up", evidence=("host: up",), where=(NIC, NODE))
    (one,) = both_sides([down("slice", NIC, NODE)], [well])
    assert one.message == "down"
    assert one.evidence == ("slice: down", "host: up")


def test_what_is_of_one_node_and_of_two_devices_is_two_findings():
    assert len(list(both_sides([down("slice", NIC, NODE)], [down("host", OTHER, NODE)]))) == 2


def test_without_a_device_the_node_ties():
    told = [
        unknown(names.MESH, subject, "-", "fix", where=(NODE,)) for subject in ("ComputeDomain a/b", NODE)
    ]
    (one,) = both_sides(told[:1], told[1:])
    assert one.subject == "ComputeDomain a/b"


sides = st.lists(
    st.builds(down, st.sampled_from("abcdef"), st.sampled_from([NIC, OTHER]), st.just(NODE)),
    max_size=4,
)


@given(sides, sides)
def test_nothing_that_either_side_says_is_lost(cluster, host):
    found = list(both_sides(cluster, host))
    told = {line for one in found for line in one.evidence}
    assert told >= {line for one in cluster for line in one.evidence}
    assert told >= {line for one in host for line in one.evidence}
    assert len(found) <= len(cluster) + len(host)
