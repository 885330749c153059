"""A typed client of the REST service, synchronous and asynchronous.

`operations` has a function for each operation that a tenant or a provider needs. It makes the request as a
value (`call`), which a client sends (`clients`). Their answers and bodies are the classes of `models`. Both
files are generated from the document that the service serves. `exchange` holds the rules of retries,
`errors` what went wrong, by what to do.

    with Client(Connection(url="https://site.example", org="acme", token=Path("token"))) as client:
        vpc = client.call(operations.create_vpc(models.VpcCreate(name="training", site_id=site)))
        for instance in client.items(operations.get_all_instance(vpc_id=vpc.id)):
            print(instance.name, instance.status)

It needs nothing of the service: of Rackloom it imports `rackloom.errors` alone.
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

# The modules that define these names, those that import httpx2 last.
_MODULES = ("call", "connection", "errors", "exchange", "events", "pages", "clients")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the module of a name when it is first used: to import httpx2 takes longer than a command."""
        if name in ("models", "operations"):
            return import_module(f"{__name__}.{name}")
        for module in _MODULES if name.isalpha() else ():
            found = vars(import_module(f"{__name__}.{module}"))
            if name in found:
                return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
