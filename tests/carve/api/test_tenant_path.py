"""The tenant's path over the real application: partition, network, machines, ready, and away again."""

from typing import Any

BOTH_STORES = True


def test_a_job_gets_its_gpus_joined_and_returns_them(api: Any) -> None:
    api.site.observe_all()
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    batch = api.new(
        "instance/batch",
        {"namePrefix": "job", "count": 2, "vpcId": vpc, "instanceTypeId": api.site.type_id},
    )
    assert [instance["status"] for instance in batch] == ["Provisioning", "Provisioning"]
    assert len({instance["nvLinkInterfaces"][0]["nvLinkDomainId"] for instance in batch}) == 1
    assert api.woken[-1] == {batch[0]["nvLinkInterfaces"][0]["nvLinkDomainId"]}

    api.site.converge()
    instance = api.get(f"instance/{batch[0]['id']}").json()
    assert instance["status"] == "Ready"
    assert [entry["status"] for entry in instance["statusHistory"]] == ["Ready", "Provisioning", "Pending"]
    assert [entry["deviceInstance"] for entry in instance["nvLinkInterfaces"]] == [0, 1, 2, 3]
    assert {entry["status"] for entry in instance["nvLinkInterfaces"]} == {"Ready"}
    assert all(int(entry["gpuGuid"]) > 2**63 for entry in instance["nvLinkInterfaces"])

    for each in batch:
        answer = api.delete(f"instance/{each['id']}")
        assert (answer.status_code, answer.json()) == (202, {"message": "Deletion request was accepted"})
        assert answer.headers["content-type"] == "application/json"
    assert api.get(f"instance/{batch[0]['id']}").json()["status"] == "Terminating"
    api.site.converge()
    assert api.get(f"instance/{batch[0]['id']}").status_code == 404
    assert api.delete(f"vpc/{vpc}").status_code == 202
    assert api.delete(f"nvlink-logical-partition/{partition}").status_code == 202
    assert api.get(f"nvlink-logical-partition/{partition}").status_code == 404
    assert api.get("nvlink-interface").json() == []
