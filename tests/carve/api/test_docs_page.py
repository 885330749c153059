"""The files of the page at /docs: nothing from elsewhere, and a policy that would refuse it."""

import re
from typing import Any

import pytest

from rackloom.carve.api.docs_page import STATIC

KINDS = {"/docs": "text/html", "/docs/docs.css": "text/css", "/docs/docs.js": "text/javascript"}


@pytest.mark.parametrize("path", KINDS)
def test_the_page_is_served_with_a_strict_policy(api: Any, path: str) -> None:
    answer = api.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"{KINDS[path]}; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_nothing_comes_from_elsewhere_or_stands_inline() -> None:
    files = {file.name: file.read_text() for file in STATIC.iterdir()}
    assert files.keys() == {"docs.html", "docs.css", "docs.js"}
    for name, text in files.items():
        assert not re.search(r"https?:|url\(|@import", text), name
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", files["docs.html"])
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "localStorage",
    ):
        assert forbidden not in files["docs.js"]
