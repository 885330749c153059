"""The client against the real application, in process and on a socket, and the examples of its page."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rackloom.app.home import Home
from rackloom.app.home_connection import home_connection
from rackloom.carve.api.auth import Role
from rackloom.client import (
    AsyncClient,
    Client,
    Conflict,
    Connection,
    Missing,
    NotPermitted,
    RequestRefused,
    SignIn,
    models,
    operations,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/api.md"
NOBODY = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def connect(api: Any) -> Any:
    def client(role: Role = Role.TENANT_ADMIN, token: str | None = None) -> Client:
        given = api.token(role=role) if token is None else token
        connection = Connection(url="http://localhost", org="demo", token=given)
        return Client(connection, transport=api.client._transport)

    return client


def test_more_than_a_page(api: Any, connect: Any) -> None:
    client = connect()
    made = [
        client.call(operations.create_vpc(models.VpcCreate(name=f"net-{number}", site_id=api.site.site_id)))
        for number in range(101)
    ]
    pages = list(client.pages(operations.get_all_vpc()))
    assert [(len(page.items), page.total) for page in pages] == [(100, 101), (1, 101)]
    listed = [vpc.id for vpc in client.items(operations.get_all_vpc(order_by="NAME_ASC"), size=30)]
    assert sorted(listed) == sorted(vpc.id for vpc in made)


def test_refusals_of_the_service(api: Any, connect: Any) -> None:
    site, tenant = api.site.site_id, connect()
    with pytest.raises(SignIn):
        connect(token="nobody's").call(operations.get_metadata())
    with pytest.raises(NotPermitted):
        connect(Role.PROVIDER_ADMIN).call(operations.get_vpc(NOBODY))
    with pytest.raises(Missing):
        tenant.call(operations.get_vpc(NOBODY))
    with pytest.raises(RequestRefused, match="name"):
        tenant.call(operations.create_vpc(models.VpcCreate(name="", site_id=site)))
    body = models.VpcCreate(name="net", site_id=site)
    made = tenant.call(operations.create_vpc(body))
    with pytest.raises(Conflict) as caught:
        tenant.call(operations.create_vpc(body))
    assert caught.value.data == {"id": made.id}


def test_the_examples_of_the_page(site: Any, capsys: Any) -> None:
    """On a socket, with the reconciler."""
    values: dict[str, Any] = {}
    for example in examples():
        exec(compile(example.replace("./site", str(site.home)), str(PAGE), "exec"), values)  # noqa: S102
    values["client"].close()
    printed = capsys.readouterr().out
    assert "worker" in printed
    assert "['train']" in printed

    async def last_kind() -> str:
        connection = home_connection(Home(site.home), org="demo", roles=["TENANT_ADMIN"])
        async with AsyncClient(connection) as client, asyncio.timeout(60):
            async for event in client.events(after="0"):
                if event.status == "Ready":
                    return event.kind
        raise AssertionError

    assert asyncio.run(last_kind())


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_examples_are_typed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("\n".join(examples()))
    mypy = (sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path / 'cache'}", str(program))
    checked = subprocess.run(mypy, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert checked.returncode == 0, checked.stdout
    program.write_text(program.read_text() + "\nclient.call(operations.get_all_vpc())\nvpc.nothing\n")
    checked = subprocess.run(mypy, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert checked.stdout.count("error:") == 2, checked.stdout
