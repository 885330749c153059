"""`rackloom demo`: the whole story on simulated racks."""

from typing import Annotated

from cyclopts import Parameter


def demo(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """Carve a rack, claim devices, prove the path: on simulated hardware, every step verified by looking.

    Parameters
    ----------
    as_json
        Print one JSON object instead of the story.
    """
    from rackloom.app.demo.tell import run_demo

    return run_demo(as_json=as_json)
