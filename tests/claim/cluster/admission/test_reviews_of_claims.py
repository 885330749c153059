"""Claims and templates: every opaque config is read strictly, and all problems are reported at once."""

import base64
import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.cluster.admission.reviews import (
    AdmissionMode,
    AdmissionVerdict,
    ReviewedResource,
    ReviewRequest,
    encode_response,
    read_review,
)
from rackloom.claim.cluster.admission.webhook import review_claim
from rackloom.core.cluster.device_configs import ChannelConfig, imex_config_json
from rackloom.errors import Refused

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
DRIVERS = ("gpu.nvidia.com", "compute-domain.nvidia.com", "dra.net", "other.example.com")
GOOD_GPU = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}
GOOD_CHANNEL = imex_config_json(ChannelConfig(domain_id="5b1f"))
GOOD_NETWORK = {"interface": {"mtu": 9000}}


def config(driver, parameters):
    return {"requests": ["one"], "opaque": {"driver": driver, "parameters": parameters}}


def asked(configs, *, version="v1", template=False, operation="CREATE", old=None):
    exactly = {"deviceClassName": "gpu.nvidia.com"}
    request = {"name": "one", **exactly} if version == "v1beta1" else {"name": "one", "exactly": exactly}
    spec = {"devices": {"requests": [request], "config": configs}}
    plural = "resourceclaimtemplates" if template else "resourceclaims"
    return ReviewRequest(
        uid="u1",
        operation=operation,
        resource=ReviewedResource("resource.k8s.io", version, plural),
        namespace="team",
        object={"metadata": {"name": "c"}, "spec": {"spec": spec} if template else spec},
        old_object=old,
    )


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
@pytest.mark.parametrize("template", [False, True])
def test_good_configs_pass_in_every_version(version, template):
    configs = [
        config("gpu.nvidia.com", GOOD_GPU),
        config("compute-domain.nvidia.com", GOOD_CHANNEL),
        config("dra.net", GOOD_NETWORK),
        config("other.example.com", {"anything": 1}),
    ]
    verdict = review_claim(asked(configs, version=version, template=template), AdmissionMode.ENFORCE)
    assert verdict == AdmissionVerdict()


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
@pytest.mark.parametrize(("template", "path"), [(False, "spec"), (True, "spec.spec")])
def test_all_problems_are_told_with_their_places(version, template, path):
    configs = [
        config("gpu.nvidia.com", {**GOOD_GPU, "shring": {}}),
        config("gpu.nvidia.com", GOOD_GPU),
        config("compute-domain.nvidia.com", {**GOOD_CHANNEL, "domainID": ""}),
        config("dra.net", {"interface": {"mtu": 1}}),
    ]
    verdict = review_claim(asked(configs, version=version, template=template), AdmissionMode.ENFORCE)
    assert not verdict.allowed
    assert verdict.message.startswith("3 configs failed to validate: object at ")
    for number, field in ((0, "shring"), (2, "domainID"), (3, "interface.mtu")):
        where = f"object at {path}.devices.config[{number}].opaque.parameters is invalid: "
        assert where in verdict.message
        assert field in verdict.message.split(where)[1]


def test_in_warn_mode_the_same_is_a_warning():
    verdict = review_claim(asked([config("dra.net", {"interface": {"mtu": 1}})]), AdmissionMode.WARN)
    assert verdict.allowed
    assert "spec.devices.config[0].opaque.parameters" in verdict.warnings[0]


@pytest.mark.parametrize("driver", DRIVERS[:3])
@pytest.mark.parametrize("parameters", [None, [], "text", 7])
def test_parameters_that_are_no_object_are_a_problem(driver, parameters):
    verdict = review_claim(asked([config(driver, parameters)]), AdmissionMode.ENFORCE)
    assert "it is no object" in verdict.message


def test_a_claim_that_was_let_in_can_still_lose_its_finalizers():
    bad = asked([config("dra.net", {"interface": {"mtu": 1}})])
    update = msgspec.structs.replace(bad, operation="UPDATE", old_object=bad.object)
    assert review_claim(update, AdmissionMode.ENFORCE) == AdmissionVerdict()
    changed = msgspec.structs.replace(update, old_object={"spec": {}})
    assert not review_claim(changed, AdmissionMode.ENFORCE).allowed


def test_another_type_is_no_question_for_this_page():
    other = msgspec.structs.replace(asked([]), resource=ReviewedResource("", "v1", "pods"))
    with pytest.raises(Refused, match="'pods'"):
        review_claim(other, AdmissionMode.ENFORCE)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(DRIVERS), JSON), max_size=4), st.booleans())
def test_any_parameters_get_a_verdict_that_counts_them(configs, template):
    verdict = review_claim(
        asked([config(*arguments) for arguments in configs], template=template), AdmissionMode.ENFORCE
    )
    lenient = review_claim(
        asked([config(*arguments) for arguments in configs], template=template), AdmissionMode.WARN
    )
    assert lenient.allowed
    assert verdict.allowed == (not lenient.warnings)
    if not verdict.allowed:
        assert verdict.message.startswith(f"{len(lenient.warnings)} configs failed to validate")


@given(
    JSON
    | st.fixed_dictionaries({"spec": JSON})
    | st.fixed_dictionaries({"spec": st.fixed_dictionaries({"devices": JSON})})
)
def test_any_object_gets_a_verdict_or_is_refused(obj):
    with contextlib.suppress(Refused):
        review_claim(msgspec.structs.replace(asked([]), object=obj), AdmissionMode.ENFORCE)


@given(st.binary(max_size=60) | JSON.map(msgspec.json.encode))
def test_a_body_that_is_no_review_is_refused(body):
    with pytest.raises(Refused, match="the body is"):
        read_review(body)


def test_a_body_nested_without_end_is_refused():
    with pytest.raises(Refused):
        read_review(
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"object":' + b"[" * 5000
        )


def test_another_version_is_refused_with_what_to_send():
    request = {"uid": "u", "operation": "CREATE"}
    body = {"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", "request": request}
    with pytest.raises(Refused, match=r"send admission\.k8s\.io/v1 AdmissionReview"):
        read_review(msgspec.json.encode(body))


def test_an_answer_carries_verdict_warnings_and_patch():
    patch = ({"op": "add", "path": "/metadata/labels", "value": {"a": "b"}},)
    answer = msgspec.json.decode(encode_response("u1", AdmissionVerdict(patch=patch, warnings=("careful",))))
    response = answer["response"]
    assert (answer["kind"], response["uid"], response["allowed"]) == ("AdmissionReview", "u1", True)
    assert response["warnings"] == ["careful"]
    assert response["patchType"] == "JSONPatch"
    assert msgspec.json.decode(base64.b64decode(response["patch"])) == list(patch)
    denied = msgspec.json.decode(encode_response("u2", AdmissionVerdict(allowed=False, message="no")))[
        "response"
    ]
    assert denied["status"] == {"code": 422, "message": "no"}
