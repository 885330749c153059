"""The doctor's result as series: a layer of which nothing is known is not known."""

import msgspec
import pytest
from tests.core.diagnosis.healthy import NOW, healthy, with_changed

from rackloom.app.doctor_metrics import registry_of
from rackloom.core.diagnosis.catalogue import HOST_CHECKS, SITE_CHECKS
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus

WELL = healthy(racks=1, trays=2)
UNREAD = tuple(
    LayerStatus(layer=Layer.FABRIC) if layer.layer is Layer.FABRIC else layer for layer in WELL.layers
)


@pytest.mark.parametrize(
    ("snapshot", "known"),
    [
        (WELL, 1.0),
        (msgspec.structs.replace(WELL, layers=UNREAD), 0.0),
        (with_changed(WELL, "domains", lambda domain: True, unknown_since=NOW - 90), 0.0),
    ],
)
def test_the_fabric_is_known_while_any_domain_is(snapshot, known):
    registry = registry_of(NOW, snapshot.layers, snapshot.domains, ())
    assert registry.get_sample_value("rackloom_doctor_layer_known", {"layer": "fabric"}) == known


@pytest.mark.parametrize("check", [*SITE_CHECKS, *HOST_CHECKS])
def test_every_check_has_a_series_from_the_start(check):
    registry = registry_of(NOW, WELL.layers, WELL.domains, ())
    labels = {"check": check, "severity": "error"}
    assert registry.get_sample_value("rackloom_doctor_findings", labels) == 0.0
