from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.imex.supervisor import PeerLayout, Peers, next_step

DNS = PeerLayout("dns", max_nodes=4)
IP = PeerLayout("ip", max_nodes=4, quorum=2)
ALONE = Peers(0, {0: "10.0.0.1"})
TWO = Peers(0, {0: "10.0.0.1", 1: "10.0.0.2"})
PEERS = st.builds(
    Peers,
    own_index=st.none() | st.integers(0, 3),
    addresses=st.dictionaries(st.integers(0, 3), st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])),
)


def test_with_names_a_daemon_starts_alone_and_is_told_of_others_by_a_signal():
    assert next_step(DNS, None, ALONE).action == "start"
    assert next_step(DNS, ALONE, TWO).action == "reload"
    assert next_step(DNS, TWO, TWO).action == "nothing"


def test_with_names_the_node_file_never_changes():
    assert next_step(DNS, None, ALONE).nodes == next_step(DNS, ALONE, TWO).nodes


def test_with_addresses_a_daemon_waits_for_all_and_restarts_when_one_moves():
    assert next_step(IP, None, ALONE).action == "wait"
    assert next_step(IP, None, TWO).nodes == "10.0.0.1\n10.0.0.2\n"
    assert next_step(IP, TWO, Peers(0, {0: "10.0.0.1", 1: "10.0.0.3"})).action == "restart"


def test_a_changed_own_index_needs_a_restart_even_with_names():
    assert next_step(DNS, TWO, Peers(1, {0: "10.0.0.2", 1: "10.0.0.1"})).action == "restart"


@given(running=st.none() | PEERS, now=PEERS, layout=st.sampled_from([DNS, IP]))
def test_nothing_starts_before_the_node_has_joined(running, now, layout):
    step = next_step(layout, running, now)
    assert (step.action == "wait") == (
        now.own_index is None or (layout.mode == "ip" and len(now.addresses) != layout.quorum)
    )


@given(now=PEERS, layout=st.sampled_from([DNS, IP]))
def test_a_step_that_was_taken_is_not_taken_again(now, layout):
    assert next_step(layout, now, now).action in ("wait", "nothing")
