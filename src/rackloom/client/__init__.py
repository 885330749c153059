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

from rackloom.client import models, operations
from rackloom.client.call import Call, PagedCall
from rackloom.client.clients import AsyncClient, Client
from rackloom.client.connection import Connection
from rackloom.client.errors import (
    Conflict,
    Missing,
    NotDecided,
    NotPermitted,
    NotUnderstood,
    OutcomeUnknown,
    RequestRefused,
    SignIn,
)
from rackloom.client.events import Event
from rackloom.client.exchange import RetryPolicy, Times
from rackloom.client.pages import Page

__all__ = [
    "AsyncClient",
    "Call",
    "Client",
    "Conflict",
    "Connection",
    "Event",
    "Missing",
    "NotDecided",
    "NotPermitted",
    "NotUnderstood",
    "OutcomeUnknown",
    "Page",
    "PagedCall",
    "RequestRefused",
    "RetryPolicy",
    "SignIn",
    "Times",
    "models",
    "operations",
]
