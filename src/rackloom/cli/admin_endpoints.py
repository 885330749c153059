"""`rackloom admin endpoint`, `browse` and `credential`: the switch controllers and the way to them."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.site.controllers import ControllerKind, kind_of, url_of_kind
from rackloom.cli.admin_client import HERE, At, Client, Connection, Printed, Serial, Url, connect
from rackloom.cli.output import columns, emit
from rackloom.errors import Refused, why

endpoint = App(name="endpoint", help="Switch controllers, by the chassis they speak for.")
credential = App(name="credential", help="Credentials of controllers.")
Kind = Annotated[
    Literal["nmx-c", "nmx-m"] | None,
    Parameter(help="What it speaks. The address says it: that of an NMX-M ends in /nmx/v1."),
]
Passworded = Annotated[Literal["nmx-m"], Parameter(help="nmx-m: the only controllers that take a password.")]


@endpoint.command(name="show")
def endpoint_show(
    *,
    chassis_serial: Annotated[str | None, Parameter(help="Only this chassis.")] = None,
    at: At = HERE,
    output: Printed = "table",
) -> None:
    """Show which controller speaks for which chassis."""
    with connect(at) as site:
        found = site.forge("ListNvlinkNmxcEndpoints", Empty()).entries
    rows = [
        (one.chassis_serial, str(kind_of(one.endpoint)), one.endpoint)
        for one in found
        if chassis_serial in (None, one.chassis_serial)
    ]
    value = [{"chassis_serial": serial, "endpoint": url, "kind": kind} for serial, kind, url in rows]
    emit(value, output, lambda: columns(("CHASSIS SERIAL", "KIND", "ENDPOINT"), rows))


@endpoint.command(name="create")
def endpoint_create(*, chassis_serial: Serial, url: Url, kind: Kind = None, at: At = HERE) -> None:
    """Register the controller of a chassis; the site speaks to it at once."""
    registered = _put_endpoint("CreateNvlinkNmxcEndpoint", chassis_serial, url, kind, at)
    print(f"created {chassis_serial} -> {registered}")


@endpoint.command(name="update")
def endpoint_update(*, chassis_serial: Serial, url: Url, kind: Kind = None, at: At = HERE) -> None:
    """Give a chassis another controller, or another address of it."""
    registered = _put_endpoint("UpdateNvlinkNmxcEndpoint", chassis_serial, url, kind, at)
    print(f"updated {chassis_serial} -> {registered}")


@endpoint.command(name="delete")
def endpoint_delete(*, chassis_serial: Serial, at: At = HERE) -> None:
    """Stop speaking to the controller of a chassis; what it told turns unknown."""
    with connect(at) as site:
        request = pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial=chassis_serial)
        site.forge("DeleteNvlinkNmxcEndpoint", request)
    print(f"deleted {chassis_serial}")


def browse(
    *,
    chassis_serial: Annotated[Serial, Parameter(help="Chassis whose controller is asked.")],
    operation: Annotated[
        Literal["compute-node-info-list", "gpu-info", "gpu-info-list"], Parameter(help="What it is asked.")
    ],
    gpu_uid: Annotated[str, Parameter(help="Fabric GUID for gpu-info, decimal or 0x hexadecimal.")] = "0",
    at: At = HERE,
) -> None:
    """Print what a controller itself answers, as JSON."""
    with connect(at) as site:
        print(ask(site, chassis_serial, operation, int(gpu_uid, 0)))


@credential.command(name="add")
def credential_add(
    kind: Passworded,
    *,
    username: Annotated[str, Parameter(help="The name.")],
    password_file: Annotated[
        Path | None, Parameter(help="File whose first line is the password; asked for where left out.")
    ] = None,
    at: At = HERE,
) -> None:
    """Keep the name and password of a controller in the site's secret provider."""
    request = pb.CredentialCreationRequest(
        credential_type=pb.NmxM, username=username, password=_password(password_file)
    )
    with connect(at) as site:
        site.forge("CreateCredential", request)
    print(f"kept the credential of {kind}")


@credential.command(name="delete")
def credential_delete(kind: Passworded, *, at: At = HERE) -> None:
    """Forget the name and password of a controller."""
    with connect(at) as site:
        site.forge("DeleteCredential", pb.CredentialDeletionRequest(credential_type=pb.NmxM))
    print(f"forgot the credential of {kind}")


def ask(site: Client, chassis_serial: str, operation: str, gpu_uid: int) -> str:
    """What a controller answers, as JSON."""
    name = f"NMXC_BROWSE_OPERATION_{operation.replace('-', '_').upper()}"
    number = pb.NmxcBrowseOperation.Value(name)
    request = pb.NmxcBrowseRequest(chassis_serial=chassis_serial, operation=number, gpu_uid=gpu_uid)
    return str(site.forge("NmxcBrowse", request).body)


def _put_endpoint(rpc: str, chassis_serial: str, url: str, kind: str | None, at: Connection) -> str:
    """Register the URL, and return it as it was registered."""
    whole = url if kind is None else url_of_kind(url, ControllerKind(kind))
    with connect(at) as site:
        site.forge(rpc, pb.NvlinkNmxcEndpoint(chassis_serial=chassis_serial, endpoint=whole))
    return whole


def _password(file: Path | None) -> str:
    if file is not None:
        try:
            return file.read_text().partition("\n")[0]
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(
                f"{file} cannot be read: {why(error)}", nearest_fix="write the password on its first line"
            ) from error
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    from getpass import getpass

    return getpass()
