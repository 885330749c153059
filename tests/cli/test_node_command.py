"""`rackloom node nic|gpu`: what the flags become."""

import pytest

from rackloom.app import node_gpu, node_nic
from rackloom.claim.node.gpu.shares import Shares
from rackloom.cli.node import app
from rackloom.errors import Refused


@pytest.fixture
def nic(monkeypatch):
    told = []
    monkeypatch.setattr(node_nic, "run_nic", lambda _common, options, _announce: told.append(options))

    def run(*words):
        app(["nic", "--node", "n", *words], result_action="return_value")
        return told[-1]

    return run


@pytest.fixture
def gpu(monkeypatch):
    told = []
    monkeypatch.setattr(node_gpu, "run_gpu", lambda _common, options, _announce: told.append(options))

    def run(*words):
        app(["gpu", "--node", "n", *words], result_action="return_value")
        return told[-1]

    return run


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), {"veth"}),
        (("--filter", "true"), set()),
        (("--filter", "true", "--leave-out", "bridge"), {"bridge"}),
        (("--leave-out", "veth", "--leave-out", "bridge"), {"veth", "bridge"}),
    ],
)
def test_a_filter_takes_the_place_of_the_default(nic, words, kinds):
    assert nic(*words).left_out_kinds == kinds


def test_ipoib_interfaces_stay_where_that_is_said(nic):
    assert nic().moves_ipoib
    assert not nic("--no-move-ib-interfaces").moves_ipoib


def test_shares_are_read_before_anything_is_served(gpu):
    assert gpu().shares == Shares()
    assert gpu("--consumable-shares", "4").shares == Shares("shares", 4)
    with pytest.raises(Refused, match="--consumable-shares is 'some'"):
        gpu("--consumable-shares", "some")
