"""The controller's process: settings that contradict one another, and its pages while another one leads."""

import msgspec
import pytest
from starlette.testclient import TestClient

from rackloom.app.controller import ControllerEndpoints, Leadership, check_settings
from rackloom.core.cluster.names import ImexIsolation, ImexMode
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings
from rackloom.errors import Refused
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube

SETTINGS = ControllerSettings(daemon=ImexDaemonSettings(image="image:1"))


def test_channels_need_daemons_of_ours():
    check_settings(SETTINGS)
    host = msgspec.structs.replace(SETTINGS, imex_mode=ImexMode.HOST_MANAGED, isolation=ImexIsolation.CHANNEL)
    with pytest.raises(Refused) as refused:
        check_settings(host)
    assert "driverManaged" in refused.value.nearest_fix


def test_a_replica_that_waits_is_healthy_and_counts_nothing():
    leadership = Leadership(DirectApi(FakeKube(), "controller"), SETTINGS, "one")
    client = TestClient(ControllerEndpoints(leadership))
    assert client.get("/healthz").status_code == 200
    page = client.get("/metrics").text
    assert "rackloom_controller_leading 0.0" in page
    assert "nvidia_dra_compute_domain_info" not in page
    assert 'rackloom_gangs{reason="Placed"} 0.0' in page
    assert client.get("/elsewhere").status_code == 404
