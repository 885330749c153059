"""Where the time of a request goes: token, routing, parameters, SQL, records, encoding, and the rest.

The application is asked in this process, without HTTP and without threads. Its CPU time per request is taken
first, without a profiler. Then cProfile says how that divides. It makes Python functions slower and C
functions not, so that the parts are an estimate: SQL, which is C, is a little larger than shown.
"""

import cProfile
import pstats
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from site_plant import call
from site_process import Request
from site_server import UNREACHED, site_deps

from rackloom.carve.api.app import create_app
from rackloom.carve.api.limits import CallerLimits
from rackloom.carve.store.database import Store

INCLUSIVE = {
    "token": (("carve/api/auth.py", "verify"),),
    "routing": (("operation.py", "matches"),),
    "parameters": (("dependencies/utils.py", "solve_dependencies"), ("carve/api/operation.py", "own_values")),
    "store": (("store/database.py", "transact"),),
}
"""Part -> the functions whose time, with all that they call, is that part."""
SQL = "sqlite3."
ENCODING = "msgspec"


async def parts_of(
    home: Path, token: str, org: str, requests: Iterator[Request], number: int
) -> dict[str, int]:
    """Microseconds of CPU time per request, in all and for each part."""
    copy = home.with_name("profiled")
    shutil.copytree(home, copy)
    store = Store.inline(copy)
    app = create_app(site_deps(store, copy), CallerLimits(tenant=UNREACHED, provider=UNREACHED))

    async def ask() -> None:
        for _ in range(number):
            method, path, body = next(requests)
            status, answer = await call(app, method, f"/v2/org/{org}/nico/{path}", token, body)
            assert status < 300, answer

    try:
        await ask()
        began = time.thread_time()
        await ask()
        total = (time.thread_time() - began) / number * 1e6
        profile = cProfile.Profile()
        profile.enable()
        await ask()
        profile.disable()
    finally:
        await store.close()
        shutil.rmtree(copy)
    return {"request_us": round(total), **_parts(pstats.Stats(profile), total)}


def _parts(stats: pstats.Stats, total: float) -> dict[str, int]:
    found: dict[str, float] = dict.fromkeys((*INCLUSIVE, "sql", "encoding"), 0.0)
    entries: Any = stats.stats  # type: ignore[attr-defined]
    whole = sum(entry[2] for entry in entries.values())
    for (file, _, name), (_, _, own, inclusive, _) in entries.items():
        for part, functions in INCLUSIVE.items():
            if any(file.endswith(where) and name == function for where, function in functions):
                found[part] += inclusive
        if SQL in name:
            found["sql"] += own
        if ENCODING in name and "encode" in name:
            found["encoding"] += own
    found["records"] = found.pop("store") - found["sql"]
    found["rest"] = whole - sum(found.values())
    return {f"{part}_us": round(seconds / whole * total) for part, seconds in found.items()}
