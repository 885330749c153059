"""The controller's process: settings that contradict one another, and its pages while another one leads."""

import msgspec
import pytest
from starlette.testclient import TestClient

from rackloom.app.controller import check_supported
from rackloom.app.controller_pages import ControllerPages
from rackloom.app.leadership import Leadership
from rackloom.claim.cluster.settings import DaemonSettings, Settings
from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.errors import Refused
from rackloom.twin.kube import DirectApi, FakeKube

SETTINGS = Settings(daemon=DaemonSettings(image="image:1"))


def test_channels_need_daemons_of_ours():
    check_supported(SETTINGS)
    host = msgspec.structs.replace(SETTINGS, imex_mode=ImexMode.HOST_MANAGED, isolation=Isolation.CHANNEL)
    with pytest.raises(Refused) as refused:
        check_supported(host)
    assert "driverManaged" in refused.value.nearest_fix


def test_a_replica_that_waits_is_healthy_and_counts_nothing():
    leadership = Leadership(DirectApi(FakeKube(), "controller"), SETTINGS, "one")
    client = TestClient(ControllerPages(leadership))
    assert client.get("/healthz").status_code == 200
    page = client.get("/metrics").text
    assert "rackloom_controller_leading 0.0" in page
    assert "nvidia_dra_compute_domain_info" not in page
    assert 'rackloom_gangs{reason="Placed"} 0.0' in page
    assert client.get("/elsewhere").status_code == 404
