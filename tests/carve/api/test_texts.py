"""Texts that people read: nothing in them hides, reorders or ends a line."""

import unicodedata
from typing import Any

import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.store.values import NAME_RULE, UNPRINTABLE, Rejected, check_name

BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Unicode property Bidi_Control."""
HARMFUL = ["\x00", "\n", "\x1b", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", *sorted(BIDI)]
HARMLESS = ["Zürich", "日本", "عربي", "עברית", "👩💻", "a b"]
UNSEEN = ["👩\u200d💻", "soft\u00adhyphen", "\u200b", "\u2060", "\u3164", "\ufe0f", "\ufeff", "\U000e0041"]
"""Harmless in a text. In a name they make another that looks the same."""
BODIES: dict[str, dict[str, Any]] = {
    "vpc": {"name": "net", "description": "d", "labels": {"key": "value"}},
    "nvlink-logical-partition": {"name": "lp", "description": "d"},
    "instance/type": {"name": "kind", "description": "d", "labels": {"key": "value"}},
    "instance": {"name": "vm", "description": "d", "labels": {"key": "value"}},
    "instance/batch": {"namePrefix": "vm", "count": 2, "description": "d", "labels": {"key": "value"}},
    "allocation": {"name": "share", "description": "d"},
}
TEXTS = [(kind, field) for kind, body in BODIES.items() for field in body if field != "count"]


def with_text(kind: str, field: str, text: str) -> dict[str, Any]:
    value = {"key": f"a{text}b"} if field == "labels" else f"a{text}b"
    return {**BODIES[kind], field: value}


def test_the_class_is_that_of_the_unicode_categories() -> None:
    letters = [chr(code) for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF]
    expected = {
        letter for letter in letters if unicodedata.category(letter) in ("Cc", "Zl", "Zp") or letter in BIDI
    }
    assert {letter for letter in letters if UNPRINTABLE.search(letter)} == expected


def test_no_name_holds_a_format_character() -> None:
    formats = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cf"]
    for letter in formats:
        with pytest.raises(Rejected):
            check_name(f"a{letter}b")
    check_name("Zürich 日本 عربي")


@pytest.mark.parametrize(("kind", "field"), TEXTS)
def test_a_text_holds_no_character_that_hides_or_reorders(api: Any, kind: str, field: str) -> None:
    needed = {"siteId": api.site.site_id, "tenantId": api.site.tenant.id, "instanceTypeId": api.site.type_id}
    needed["vpcId"] = api.vpc("the network")
    role = Role.PROVIDER_ADMIN if kind in ("allocation", "instance/type") else Role.TENANT_ADMIN
    for letter in HARMFUL:
        answer = api.post(kind, with_text(kind, field, letter) | needed, role=role)
        assert answer.status_code == 400, (letter.encode("unicode_escape"), answer.text)
        assert any(name.split(".")[0] in (field, "body") for name in answer.json()["data"]), answer.text
    is_name = field in ("name", "namePrefix")
    for text in UNSEEN if is_name else ():
        answer = api.post(f"{kind}?dryRun=true", with_text(kind, field, text) | needed, role=role)
        assert (answer.status_code, answer.json()["data"]) == (400, {field: NAME_RULE}), text
    for text in HARMLESS if is_name else HARMLESS + UNSEEN:
        answer = api.post(f"{kind}?dryRun=true", with_text(kind, field, text) | needed, role=role)
        assert "data" not in answer.json() or field not in answer.json()["data"], answer.text


def test_a_key_of_a_label_is_a_text_too(api: Any) -> None:
    for kind, vpc in (("vpc", None), ("instance", api.vpc("the network"))):
        body = {**BODIES[kind], "siteId": api.site.site_id, "vpcId": vpc, "instanceTypeId": api.site.type_id}
        answer = api.post(kind, body | {"labels": {"a\u202eb": "value"}})
        assert answer.status_code == 400, answer.text


def test_a_change_is_checked_like_a_creation(api: Any) -> None:
    vpc = api.vpc("net")
    instance = api.instance(vpc, labels={"team": "a"})
    assert instance["labels"] == {"team": "a"}
    partition = api.partition()
    for path in (f"vpc/{vpc}", f"instance/{instance['id']}", f"nvlink-logical-partition/{partition}"):
        for field in ("name", "description"):
            answer = api.patch(path, {field: "a\u2066b"})
            assert (answer.status_code, list(answer.json()["data"])) == (400, [field]), path
    for path in (f"vpc/{vpc}", f"instance/{instance['id']}"):
        assert api.patch(path, {"labels": {"key": "a\u2066b"}}).status_code == 400
        assert api.patch(path, {"labels": {"key": "b"}}).json()["labels"] == {"key": "b"}
        assert api.patch(path, {"labels": None}).json()["labels"] == {"key": "b"}
        assert api.patch(path, {"labels": {}}).json()["labels"] == {}


def test_a_script_may_have_lines(api: Any) -> None:
    made = api.instance(api.vpc(), userData="#!/bin/sh\n\techo\n")
    assert made["userData"] == "#!/bin/sh\n\techo\n"
