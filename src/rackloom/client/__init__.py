"""A typed client of the REST service, synchronous and asynchronous.

`operations` has a function for each operation that a tenant or a provider needs. It makes the request as a
value (`call`), which a client sends (`clients`). The bodies of requests and answers are the classes of
`models`. Both files are generated from the OpenAPI document of the service. `exchange` holds the rules of
retries. `errors` has an exception for each thing that the caller can do about an error.

    with Client(Connection(url="https://site.example", org="acme", token=Path("token"))) as client:
        vpc = client.call(operations.create_vpc(models.VpcCreate(name="training", site_id=site)))
        for instance in client.items(operations.get_all_instance(vpc_id=vpc.id)):
            print(instance.name, instance.status)

It does not depend on the service. Of Rackloom it imports only `errors`, `runtime.foreign_text` and two small
modules of `serving`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rackloom.client import models as models
    from rackloom.client import operations as operations
    from rackloom.client.call import Call as Call
    from rackloom.client.call import PagedCall as PagedCall
    from rackloom.client.clients import AsyncClient as AsyncClient
    from rackloom.client.clients import Client as Client
    from rackloom.client.connection import Connection as Connection
    from rackloom.client.errors import Conflict as Conflict
    from rackloom.client.errors import Missing as Missing
    from rackloom.client.errors import NotDecided as NotDecided
    from rackloom.client.errors import NotPermitted as NotPermitted
    from rackloom.client.errors import NotUnderstood as NotUnderstood
    from rackloom.client.errors import OutcomeUnknown as OutcomeUnknown
    from rackloom.client.errors import RequestRefused as RequestRefused
    from rackloom.client.errors import SignIn as SignIn
    from rackloom.client.events import Event as Event
    from rackloom.client.exchange import RetryPolicy as RetryPolicy
    from rackloom.client.exchange import Times as Times
    from rackloom.client.pages import Page as Page

_NAMES = {
    "call": "Call PagedCall",
    "clients": "AsyncClient Client",
    "connection": "Connection",
    "errors": "Conflict Missing NotDecided NotPermitted NotUnderstood OutcomeUnknown RequestRefused SignIn",
    "events": "Event",
    "exchange": "RetryPolicy Times",
    "pages": "Page",
}
"""The names that each module defines."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the module of a name at its first use: importing httpx2 takes longer than a command."""
        if name in ("models", "operations"):
            return import_module(f"{__name__}.{name}")
        for module, names in _NAMES.items():
            if name in names.split():
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
