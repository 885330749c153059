"""The parts of a request that are logged, and those that are not."""

import re
from collections.abc import Iterator

import pytest

from rackloom.serving.request_log import asked, log_requests


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The lines that are logged."""
    found: list[str] = []
    log_requests(found.append)
    yield found
    log_requests(None)


def test_a_line_has_what_was_asked_what_came_of_it_and_the_time(lines: list[str]) -> None:
    site, path = "https://site.example", "v2/org/demo/nico/vpc"
    for address in ((f"{site}/{path}",), (site, path), (f"{site}/", path)):
        with asked("GET", *address) as request:
            request.outcome = 200
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(r"GET https://site\.example/v2/org/demo/nico/vpc: 200 in \d+ ms", line)


def test_nothing_that_may_be_secret_is_part_of_it(lines: list[str]) -> None:
    with asked("GET", "https://user:s3cr3t@site.example:8443/path?token=s3cr3t#s3cr3t"):
        pass
    with asked("GET", "path?token=s3cr3t"):
        pass
    assert [line.partition(": ")[0] for line in lines] == ["GET https://site.example:8443/path", "GET path"]


def test_an_error_is_named_and_goes_on(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="s3cr3t"), asked("CALL", "localhost:1079/ShowDomains"):
        raise ValueError("s3cr3t")
    assert re.fullmatch(r"CALL localhost:1079/ShowDomains: ValueError in \d+ ms", lines[0])


def test_without_a_listener_nothing_is_logged() -> None:
    with asked("GET", "https://site.example") as request:
        request.outcome = 200
