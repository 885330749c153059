import json

import pytest

from rackloom.claim.imex.nvidia_imex import UnknownOutput, mesh_of, parse_domain, parse_local


def printed(links: dict[tuple[int, int], str], nodes: int = 3) -> str:
    return json.dumps(
        {
            "nodes": {
                str(here): {
                    "status": "READY",
                    "host": f"10.0.0.{here}",
                    "hostName": f"compute-domain-daemon-{here:04d}",
                    "connections": {
                        str(there): {
                            "host": f"10.0.0.{there}",
                            "status": links.get((here, there), "CONNECTED"),
                            "changed": False,
                        }
                        for there in range(nodes)
                    },
                    "changed": False,
                    "version": "580.95.05",
                }
                for here in range(nodes)
            },
            "timestamp": "1/1/2026 00:00:00.000",
            "status": "UP",
        }
    )


def test_a_mesh_is_complete_when_every_member_is_connected_both_ways():
    mesh = mesh_of(parse_domain(printed({})), 0, [0, 1, 2])
    assert (mesh.complete, mesh.peers, mesh.missing) == (True, 2, ())


def test_one_direction_is_not_enough():
    mesh = mesh_of(parse_domain(printed({(2, 0): "DISCONNECTED"})), 0, [0, 1, 2])
    assert mesh.missing == ("2 -> 0: DISCONNECTED",)


def test_places_that_nobody_has_taken_are_not_missed():
    domain = parse_domain(printed({(0, 2): "NEVER_CONNECTED", (2, 0): "NEVER_CONNECTED"}))
    assert mesh_of(domain, 0, [0, 1]).complete


def test_a_member_that_the_daemon_does_not_know_is_missed():
    mesh = mesh_of(parse_domain(printed({})), 0, [0, 5])
    assert mesh.missing == ("0 -> 5: no connection", "5 -> 0: node 5 is not in the domain")


def test_status_word():
    assert parse_local("READY\n") == "READY"


@pytest.mark.parametrize("output", ["", "\n", "Error: cannot connect\n"])
def test_other_output_is_no_status(output):
    with pytest.raises(UnknownOutput):
        parse_local(output)


@pytest.mark.parametrize("output", ["", "READY", "[]", '{"status": "UP"}', b"\xff"])
def test_other_output_is_no_domain(output):
    with pytest.raises(UnknownOutput):
        parse_domain(output)
