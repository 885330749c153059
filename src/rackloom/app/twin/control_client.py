"""A client of the control of a running simulated site, in this process or in another one.

It finds the control by the file that the site writes into its home. A home without the file, and a site
that does not answer any more, are refused with the remedy.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec

from rackloom.app.twin.control_messages import (
    ClearedReport,
    ControlAccess,
    PlayRequest,
    Refusal,
    SiteReport,
    control_file,
)
from rackloom.errors import Refused, Undecodable, file_error_text
from rackloom.lab.scenario.played import PlayedScenario, PlayedStep
from rackloom.runtime.foreign_text import decode_json
from rackloom.serving.request_log import asked

CONNECT_SECONDS = 10.0
T = TypeVar("T")


class ControlClient:
    """Plays on the site that runs in a home. Close it after use. It may be used by one thread at a time."""

    def __init__(self, home: Path) -> None:
        self._home = home
        access = read_access(home)
        self._http = httpx2.Client(
            base_url=access.url,
            headers={"Authorization": f"Bearer {access.token}"},
            # A step lasts as long as its file defines.
            timeout=httpx2.Timeout(CONNECT_SECONDS, read=None),
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connection. The site goes on."""
        self._http.close()

    def site(self) -> SiteReport:
        """The site now. Raises Refused if it does not answer."""
        return self._ask("GET", "site", None, SiteReport)

    def step(self, table: Mapping[str, Any]) -> PlayedStep:
        """Play one step. Raises Refused if it is no step, or cannot be on this site."""
        return self._ask("POST", "step", dict(table), PlayedStep)

    def fault(self, table: Mapping[str, Any]) -> PlayedStep:
        """Play one step that breaks something. Raises Refused as `step` does, and for one that does not."""
        return self._ask("POST", "fault", dict(table), PlayedStep)

    def clear(self) -> str:
        """Repair everything. Return a description of the repairs."""
        return self._ask("POST", "clear", None, ClearedReport).seen

    def play(self, file: Path, report: Callable[[PlayedStep], None]) -> PlayedScenario:
        """Play a file. `report` gets each step as it is over. Raises Refused if the file is wrong."""
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(
                f"{file} cannot be read: {file_error_text(error)}", nearest_fix="give a scenario file"
            ) from error
        content = msgspec.json.encode(PlayRequest(text, file.stem, str(file)))
        with self._reached(), self._http.stream("POST", "play", content=content) as answer:
            if answer.status_code != httpx2.codes.OK:
                raise self._refusal(answer.status_code, answer.read())
            line = None
            for text_line in answer.iter_lines():
                if line is not None:
                    report(decode_json(line, "a step", PlayedStep))
                line = text_line
            try:
                return decode_json(line or "", "the result", PlayedScenario)
            except Undecodable as error:
                raise self._ended() from error

    def _ask(self, method: str, path: str, body: object, kind: type[T]) -> T:
        content = None if body is None else msgspec.json.encode(body)
        with self._reached(), asked(method, self._http.base_url, path) as request:
            answer = self._http.request(method, path, content=content)
            request.outcome = answer.status_code
        if answer.status_code != httpx2.codes.OK:
            raise self._refusal(answer.status_code, answer.content)
        return decode_json(answer.content, path, kind)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TransportError as error:
            raise self._ended() from error

    def _ended(self) -> Refused:
        return Refused(
            f"the site in {self._home} does not answer: it has ended", nearest_fix=_start(self._home)
        )

    def _refusal(self, status: int, body: bytes) -> Refused:
        try:
            found = decode_json(body, "the refusal", Refusal)
        except Undecodable:
            return Refused(f"the site in {self._home} answers {status}", nearest_fix="see its log")
        return Refused(found.reason, nearest_fix=found.fix)


def read_access(home: Path) -> ControlAccess:
    """The access to the control of the site in a home. Refused if none runs there."""
    try:
        return decode_json(control_file(home).read_bytes(), str(home), ControlAccess)
    except OSError as error:
        why = f"no site runs in {home}: {control_file(home).name}: {file_error_text(error)}"
        raise Refused(why, nearest_fix=_start(home)) from error
    except Undecodable as error:
        raise Refused(f"{control_file(home)} is damaged: {error.reason}", nearest_fix=_start(home)) from error


POLL_SECONDS = 0.1


def wait_for_site(home: Path, seconds: float, has_ended: Callable[[], bool] = lambda: False) -> SiteReport:
    """The site in a home, once it answers and its nodes are up, or as it is now if `seconds` is 0.

    Raises Refused if that takes longer, or as soon as `has_ended` shows that it will not come about.
    """
    deadline = time.monotonic() + seconds
    while True:
        is_over = has_ended() or time.monotonic() >= deadline
        try:
            with closing(ControlClient(home)) as client:
                report = client.site()
            if report.nodes_up or not seconds:
                return report
        except Refused:
            if is_over:
                raise
        if is_over:
            up = f"the site in {home} has not made all of its trays nodes within {seconds:g} s"
            raise Refused(up, nearest_fix="wait longer, or look into its log")
        time.sleep(POLL_SECONDS)


def _start(home: Path) -> str:
    return f"start one with: rackloom up --home {home}"
