from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.imex.hosts import with_peers

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
