"""`rackloom twin`: incidents replayed on the production code."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

app = App(name="twin", help="Incidents replayed on the production code, over simulated racks.")


@app.command
def play(
    file: Path,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    speed: Literal["real", "virtual"] = "real",
    home: Path | None = None,
) -> int:
    """Play a scenario: exit 0 only if everything that it expects was observed.

    Parameters
    ----------
    file
        A scenario file, or the name of one that `rackloom twin list` shows.
    as_json
        Print one JSON object instead of the transcript.
    speed
        Real time, over sockets; or virtual time, in which an hour takes seconds.
    home
        Directory for records, keys and logs of the simulated site, kept afterwards; default: a temporary one.
    """
    from rackloom.twin.scenario.library import find
    from rackloom.twin.scenario.read import read_scenario
    from rackloom.twin.scenario.tell import line, summary

    scenario = read_scenario(find(file))  # What is wrong with it is told before a whole site is imported.
    from rackloom.app.playing import play_scenario

    said = (lambda _: None) if as_json else (lambda played: print(line(played), flush=True))
    played = play_scenario(scenario, speed=speed, home=home, tell=said)
    if as_json:
        import msgspec

        print(msgspec.json.encode(played).decode())
    else:
        print(summary(played))
    return 0 if played.ok else 1


@app.command(name="list")
def list_scenarios() -> None:
    """List the scenarios that ship with Rackloom."""
    from rackloom.cli.output import columns
    from rackloom.twin.scenario.library import shipped

    rows = [
        (one.name, ",".join(sorted(one.layers)), ",".join(sorted(one.speeds)), one.title) for one in shipped()
    ]
    print(columns(("SCENARIO", "LAYERS", "SPEEDS", "WHAT HAPPENS"), rows))
