"""Steps in which the leader of a domain's switch controllers moves to another address.

NMX-C runs on several switch trays of a domain, and one of them leads. When another one takes over, it
answers at its own address, and an operator registers that address with the site. The former leader may
come back with the state that it remembers (two controllers then claim one domain) or learn that it no
longer leads.

`heal_leaders` ends every former leadership and registers each leader that the site does not know.
"""

from rackloom.lab.scenario.model import action, require
from rackloom.lab.scenario.parameters import FIRST_RACK, Rack
from rackloom.lab.scenario.stage import Stage

ENDPOINT_PATH = "nvlink-nmxc-endpoint"


@action(needs="nmx-c")
async def switch_leader_moves(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """The controller on another switch tray of a rack leads, at its own address. The old one is silent."""
    switch = stage.truth.rack(rack)
    before = switch.url
    await switch.move()
    stage.damage.unregistered.add(rack)
    stage.damage.succeeded.add(rack)
    # A controller that was stopped answers again, elsewhere: nothing is left to be started.
    stage.damage.stopped.discard(rack)
    return f"the leader of {rack} went from {before} to {switch.url}"


@action(needs="nmx-c")
async def switch_old_leader_returns(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """The former leader of a rack leads again at its old address, with the state that it remembers."""
    moved = rack in stage.damage.succeeded
    require(moved, f"the leader of {rack} did not move: write a switch-leader-moves step before")
    url = await stage.truth.rack(rack).old_leader_returns()
    return f"who led {rack} before leads again at {url}, and has missed what came since"


@action(needs="nmx-c")
async def switch_old_leader_yields(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """It has learned that another one leads, and lists no GPU any more."""
    await stage.truth.rack(rack).old_leader_yields()
    return f"who led {rack} before lists no GPU any more"


@action(needs="nmx-c")
async def switch_standby_registered(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """An operator also registers the next leader of a rack. Before it leads it lists no GPU."""
    url = await stage.truth.rack(rack).stand_by()
    # It is the controller of a switch tray, which has its own serial.
    serial = f"{stage.truth.serials[stage.truth.number(rack)][0]}-standby"
    if rack in stage.with_standby:
        await stage.rest.must(None, "PATCH", f"{ENDPOINT_PATH}/{serial}", {"endpoint": url})
    else:
        await stage.rest.must(None, "POST", ENDPOINT_PATH, {"chassisSerial": serial, "endpoint": url})
        stage.with_standby.add(rack)
    return f"the standby of {rack} at {url} is registered too"


@action(needs="nmx-c")
async def switch_leader_registered(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """An operator registers the present address of the leader of a rack."""
    url = stage.truth.rack(rack).url
    await _register(stage, rack)
    return f"the leader of {rack} is registered at {url}"


async def heal_leaders(stage: Stage) -> None:
    """No former leader leads, and the site knows where every leader is."""
    for rack in sorted(stage.damage.succeeded):
        await stage.truth.rack(rack).old_leader_yields()
    for rack in sorted(stage.damage.unregistered):
        await _register(stage, rack)


async def _register(stage: Stage, rack: str) -> None:
    for serial in stage.truth.serials[stage.truth.number(rack)]:
        endpoint = {"endpoint": stage.truth.rack(rack).url}
        await stage.rest.must(None, "PATCH", f"{ENDPOINT_PATH}/{serial}", endpoint)
    stage.damage.unregistered.discard(rack)
