from hypothesis import example, given
from hypothesis import strategies as st

from rackloom.claim.imex.config import ImexFiles, daemon_host, with_peers
from rackloom.claim.imex.member import peers_of
from rackloom.claim.imex.supervisor import PeerLayout, next_step
from rackloom.core.cluster.domain_objects import ComputeDomainClique, DaemonInfo
from rackloom.core.cluster.names import BOOT_FILE
from rackloom.core.domains.clique import is_ip_address

KUBELETS = "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n10.0.0.3\tpod-a\n"
ADDRESSES = st.dictionaries(st.integers(0, 71), st.ip_addresses().map(str), max_size=8)


def test_peers_follow_the_lines_of_the_kubelet():
    assert with_peers(KUBELETS, {1: "10.0.0.9", 0: "10.0.0.3"}) == (
        KUBELETS + "# Compute Domain Daemon mappings\n"
        "10.0.0.3\tcompute-domain-daemon-0000\n10.0.0.9\tcompute-domain-daemon-0001\n"
    )


@given(first=ADDRESSES, then=ADDRESSES)
def test_nothing_remains_of_peers_that_left(first, then):
    assert with_peers(with_peers(KUBELETS, first), then) == with_peers(KUBELETS, then)


CRAFTED = "10.0.0.66\tapi.example.com\n10.0.0.66"
ENTRIES = st.lists(
    st.tuples(st.integers(-1, 20), st.one_of(st.text(), st.ip_addresses().map(str), st.just("fe80::1%a\nb"))),
    max_size=6,
)


def members(*entries):
    daemons = tuple(
        DaemonInfo(node_name=f"node-{number}", ip_address=address, clique_id="c", index=index)
        for number, (index, address) in enumerate(entries)
    )
    return ComputeDomainClique(compute_domain="cd", clique_id="c", daemons=daemons)


@given(ENTRIES)
@example([(1, CRAFTED)])
@example([(1, "::1%lo 10.0.0.66 api.example.com")])
def test_whatever_a_peer_enters_as_its_address_it_writes_no_line_of_its_own_choice(entries):
    peers = peers_of(members((0, "10.0.0.1"), *entries), "node-0")
    for addresses in (peers.addresses, dict(entries)):
        *ours, marker = with_peers(KUBELETS, {}).splitlines()
        written = with_peers(KUBELETS, addresses).splitlines()
        assert written[: len(ours) + 1] == [*ours, marker]
        for line in written[len(ours) + 1 :]:
            address, name = line.split("\t")
            assert is_ip_address(address)
            assert name in {daemon_host(index) for index in addresses}
    nodes = next_step(PeerLayout("ip", 18, len(peers.addresses)), None, peers).nodes
    assert all(is_ip_address(line) for line in nodes.splitlines())


def test_members_whose_entry_cannot_be_used_are_named():
    entries = ((0, "10.0.0.1"), (1, CRAFTED), (2, "10.0.0.1"), (0, "10.0.0.9"), (4, "10.0.0.5"))
    peers = peers_of(members(*entries), "node-0")
    assert peers.addresses == {0: "10.0.0.1", 4: "10.0.0.5"}
    assert peers.unusable == (
        "node-1: its address is no IP address",
        "node-2: it has the address of node-0",
        "node-3: its index 0 is taken",
    )


@given(ENTRIES)
def test_no_peer_takes_the_name_of_this_node_or_its_address(entries):
    """nvidia-imex takes itself for the first name that is an address of its machine."""
    peers = peers_of(members((3, "10.0.0.1"), *entries), "node-0")
    assert [index for index, address in peers.addresses.items() if address == "10.0.0.1"] == [3]


def test_the_boot_is_written_where_the_plugin_named_one(tmp_path):
    files = ImexFiles(tmp_path, tmp_path / "hosts")
    files.write_boot("")
    assert not (tmp_path / BOOT_FILE).exists()
    files.write_boot("this one")
    assert (tmp_path / BOOT_FILE).read_text() == "this one"


def test_a_boot_that_cannot_be_written_ends_no_daemon(tmp_path):
    (tmp_path / BOOT_FILE).mkdir()
    ImexFiles(tmp_path, tmp_path / "hosts").write_boot("this one")
