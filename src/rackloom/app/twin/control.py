"""The control of a running simulated site: steps of scenarios, over HTTP on loopback.

`rackloom up` serves it beside REST, and writes its address and token into `control.json` in the home
(mode 0600, deleted at the end), so anyone who may read the home may break the site. A client reads the site
(`GET /site`), plays one step (`POST /step`, a table as JSON, or `POST /fault`, which takes only faults)
or a whole file (`POST /play`, the answer is a line of JSON for each step and one for the whole), and clears
every fault (`POST /clear`).

The steps are those of scenario files, and a running site remembers the objects that they made: a later step
or file may use the names of earlier ones. Steps that name an instance also take `rack-R/T`, for any occupant
of tray T of rack R, so that trays which tenants got over REST can be broken too. One step or file is played
at a time, and the next waits. A step that cannot be played is answered 400 with reason and nearest fix.

The stage, which watches every change of the fabrics, is made for the first step: a site without any steps
pays nothing for it.
"""

import asyncio
import hmac
import os
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rackloom.app.listeners import serve_http
from rackloom.app.twin.control_messages import (
    ClearedReport,
    ControlAccess,
    PlayRequest,
    Refusal,
    SiteReport,
    TrayReport,
    control_file,
)
from rackloom.app.twin.scenarios import require_playable
from rackloom.errors import Refused
from rackloom.lab.scenario.every_layer import clear
from rackloom.lab.scenario.model import ACTIONS, Scenario, Step
from rackloom.lab.scenario.played import PlayedScenario, PlayedStep
from rackloom.lab.scenario.playing import StepPlayer, play_steps
from rackloom.lab.scenario.reading import KnownNames, file_so_far, parse_scenario, read_step, step_problems
from rackloom.lab.scenario.rest_client import MadeInstance
from rackloom.lab.scenario.stage import SimulatedRacks, Stage
from rackloom.lab.switches.fabric import SeededNames, machine_id_of
from rackloom.runtime.durable_files import write_durably
from rackloom.runtime.foreign_text import decode_json
from rackloom.serving.limits import SIMULATED_CONTROL
from rackloom.topology.part_names import PartName
from rackloom.topology.rack import RackProfile

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 1 << 20
"""The size limit of a request: a scenario file is a few kilobytes."""

# The site that is controlled.


def tray_reports(racks: SimulatedRacks) -> tuple[TrayReport, ...]:
    """Every tray of a site, rack by rack."""
    names = SeededNames(racks.seed)
    return tuple(
        TrayReport(
            name=str(PartName(tray.rack, tray.slot)),
            node=names.node(tray.chassis_serial, tray.slot),
            machine=machine_id_of(tray.chassis_serial, tray.slot),
        )
        for domain in racks.site.domains
        for tray in domain.trays
    )


class ControlledSite(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a controlled site that the control needs."""

    make_stage: Callable[[], Stage]
    report: Callable[[], SiteReport]
    profile: RackProfile
    profile_name: str
    racks: int
    """Domains, each with a switch controller."""
    nodes_settle: Callable[[], Awaitable[None]]
    """Returns once every tray is a node, and the cluster knows the switches' state or takes too long."""
    cluster_steps: frozenset[str] | None = None
    """Steps of the layer `cluster` that can be played, or None for all of them."""


# Playing on a running site.


class SitePlayer:
    """Plays steps and files on a running site, one after the other."""

    def __init__(self, site: ControlledSite) -> None:
        self._site = site
        self._turn = asyncio.Lock()
        self._stage: Stage | None = None
        self._objects: set[str] = set()

    @property
    def stage(self) -> Stage:
        """Made at the first call."""
        if self._stage is None:
            self._stage = stage = self._site.make_stage()
            for domain in stage.truth.site.domains:
                for tray in domain.trays:
                    # Any occupant of a tray can be named by the tray, as the one member of a group.
                    name = str(PartName(tray.rack, tray.slot))
                    stage.rest.trays[name] = MadeInstance("", "", stage.truth.machine(name))
        return self._stage

    def report(self) -> SiteReport:
        """The site now."""
        return self._site.report()

    async def step(self, table: Any, *, only_faults: bool = False) -> PlayedStep:
        """Play one step. Refused if it is no step (`only_faults`: no fault), or cannot be on this site."""
        step = read_step(table, "the step")
        if only_faults and not step.step_kind.breaks:
            faults = ", ".join(sorted(name for name, kind in ACTIONS.items() if kind.breaks))
            raise Refused(f"{step.step_kind.name} breaks nothing", nearest_fix=f"one of {faults}")
        problems, objects = self._checked([step])
        for reason, fix in problems:
            raise Refused(reason, nearest_fix=fix)
        if "real" not in step.step_kind.speeds:
            raise Refused(f"{step.step_kind.name} can be played in virtual time only", nearest_fix=_VIRTUAL)
        self._require_cluster(step)
        await self._settle([step])
        async with self._turn:
            played = await StepPlayer("real", self.stage).play(1, step)
        self._objects |= objects
        return played

    def read(self, text: str, name: str, where: str) -> Scenario:
        """The scenario in a file. Refused if it is not a scenario, or not one of this site."""
        defaults = {"profile": self._site.profile_name, "racks": self._site.racks}
        scenario = parse_scenario(text, name, where, known=self._known(), defaults=defaults)
        if scenario.profile != self._site.profile_name:
            raise Refused(
                f"{where} is about {scenario.profile}, and this site has {self._site.profile_name}",
                nearest_fix=f"start a site with --profile {scenario.profile}",
            )
        if scenario.racks > self._site.racks:
            raise Refused(
                f"{where} needs {scenario.racks} racks, and this site has {self._site.racks}",
                nearest_fix=f"start a site with --racks {scenario.racks}",
            )
        if scenario.candidates > 1:
            raise Refused(
                f"{where} needs two candidates, and the controllers of a running site are not elected",
                nearest_fix="play it on a site of its own: leave --on out",
            )
        require_playable(scenario, "real")
        for step in scenario.steps:
            self._require_cluster(step)
        return scenario

    async def play(self, scenario: Scenario, report: Callable[[PlayedStep], None]) -> PlayedScenario:
        """Play a whole file. `report` gets each step as it is over."""
        await self._settle(scenario.steps)
        async with self._turn:
            played = await play_steps(scenario, "real", self.stage, report)
        _, objects = self._checked(scenario.steps)
        self._objects |= objects
        return played

    async def clear(self) -> str:
        """Repair everything, also faults that have not struck yet."""
        async with self._turn:
            return await clear(self.stage)

    async def _settle(self, steps: Iterable[Step]) -> None:
        """A step of the cluster needs its nodes, which appear after REST answers.

        Other steps are played until then: nodes do not appear before a fault of the API server is repaired.
        """
        if any(step.step_kind.layer == "cluster" for step in steps):
            await self._site.nodes_settle()

    def _require_cluster(self, step: Step) -> None:
        kind, steps = step.step_kind, self._site.cluster_steps
        if steps is not None and kind.layer == "cluster" and kind.name not in steps:
            raise Refused(
                f"{kind.name} needs the simulated API server, and these trays are in a cluster of others",
                nearest_fix="play it on a site without --kubeconfig",
            )

    def _checked(self, steps: Iterable[Step]) -> tuple[list[tuple[str, str]], set[str]]:
        """The faults in these steps, and the objects that may be named after them."""
        file = file_so_far(self.stage.truth.site, self._known())
        problems = [problem for step in steps for problem in step_problems(step, file)]
        return problems, file.made["object"]

    def _known(self) -> KnownNames:
        stage, known = self.stage, defaultdict[str, set[str]](set)
        known["logical partition"] = set(stage.rest.partitions)
        known["VPC"] = set(stage.rest.vpcs)
        known["instance"] |= set(stage.rest.trays)
        for group, members in stage.rest.groups.items():
            known["instance"] |= {f"{group}/{number}" for number in range(1, len(members) + 1)}
            if any(member.id for member in members):
                known["group"].add(group)
        known["partition by hand"] = set(stage.truth.invariants.foreign)
        known["list read by hand"] = set(stage.lists_read)
        known["object"] = self._objects
        return known


_VIRTUAL = "play it in a file, on a site of its own: rackloom twin play FILE --speed virtual"


# Over HTTP.


class ControlApplication:
    """An ASGI application that plays on one site for any holder of its token."""

    def __init__(self, player: SitePlayer, token: str) -> None:
        self._player = player
        self._token = token.encode()
        self._pages: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            ("GET", "/site"): self._site,
            ("POST", "/step"): self._step,
            ("POST", "/fault"): self._fault,
            ("POST", "/play"): self._play,
            ("POST", "/clear"): self._clear,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        await (await self._answer(request))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            return Response("the token of control.json is needed\n", 401)
        page = self._pages.get((request.method, request.url.path))
        if page is None:
            return Response("not found\n", 404)
        try:
            return await page(request)
        except Refused as refused:
            return _json(Refusal(refused.reason, refused.nearest_fix), 400)
        except msgspec.MsgspecError as error:
            return _json(Refusal(f"the request is not understood: {error}", None), 400)
        except ClientDisconnect:
            return Response(status_code=400)

    async def _site(self, _: Request) -> Response:
        return _json(self._player.report())

    async def _step(self, request: Request) -> Response:
        return _json(await self._player.step(decode_json(await _body(request), "the request")))

    async def _fault(self, request: Request) -> Response:
        table = decode_json(await _body(request), "the request")
        return _json(await self._player.step(table, only_faults=True))

    async def _clear(self, _: Request) -> Response:
        return _json(ClearedReport(await self._player.clear()))

    async def _play(self, request: Request) -> Response:
        wanted = decode_json(await _body(request), "the request", PlayRequest)
        scenario = self._player.read(wanted.text, wanted.name, wanted.where)
        return StreamingResponse(self._lines(scenario), media_type="application/x-ndjson")

    async def _lines(self, scenario: Scenario) -> AsyncIterator[bytes]:
        """Each step as it is over, and last, the whole. A client that hangs up ends the play."""
        queue: asyncio.Queue[PlayedStep] = asyncio.Queue()
        playing = asyncio.create_task(self._player.play(scenario, queue.put_nowait))
        try:
            while not (playing.done() and queue.empty()):
                taking = asyncio.create_task(queue.get())
                await asyncio.wait((taking, playing), return_when=asyncio.FIRST_COMPLETED)
                if taking.done():
                    yield msgspec.json.encode(taking.result()) + b"\n"
                else:
                    taking.cancel()
            yield msgspec.json.encode(playing.result()) + b"\n"
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)


async def _body(request: Request) -> bytes:
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > MAX_BODY_BYTES:
            raise Refused("the request is too large", nearest_fix=f"up to {MAX_BODY_BYTES} bytes")
    return bytes(found)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


@asynccontextmanager
async def served_control(site: ControlledSite, home: Path) -> AsyncIterator[ControlAccess]:
    """Serve the control on loopback. `control.json` (0600) is in the home for as long."""
    token = secrets.token_urlsafe(32)
    app = ControlApplication(SitePlayer(site), token)
    file = control_file(home)
    async with serve_http(app, f"{LOOPBACK}:0", limits=SIMULATED_CONTROL) as port:
        access = ControlAccess(f"http://{LOOPBACK}:{port}", token, os.getpid())
        write_durably(file, msgspec.json.encode(access))
        try:
            yield access
        finally:
            file.unlink(missing_ok=True)
