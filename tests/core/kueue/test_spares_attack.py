"""Spares of two workloads under one limit."""
from tests.core.kueue.test_placement_pass import CHECK, admitted, rack, workload
from rackloom.core.gangs.spec import GangSettings
from rackloom.core.kueue.checks import KueueCluster, PlacementPass


def gang(name):
    annotations = {"rackloom.dev/gang-size": "1", "rackloom.dev/gang-spares": "1"}
    return workload(name, 1, 4, metadata={"labels": {"rackloom.dev/gang": name}, "annotations": annotations})


def test_spares_that_were_just_planned_count():
    cluster, first, second = KueueCluster(nodes=rack(0, 8)), gang("g1"), gang("g2")
    served = PlacementPass(cluster, [first, second], [CHECK], GangSettings(max_spares=1))
    ready = served.decide(first, CHECK)
    assert ready.state == "Ready"
    later = PlacementPass(cluster, [admitted(first, ready), second], [CHECK], GangSettings(max_spares=1))
    assert (served.decide(second, CHECK).state, later.decide(second, CHECK).state) == ("Retry", "Retry")
