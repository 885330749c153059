"""`rackloom admin endpoint`, `browse` and `credential`: the switch controllers and the way to them."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.cli.admin_client import HERE, At, Client, Connection, connect
from rackloom.cli.output import Output, columns, emit
from rackloom.errors import Refused

endpoint = App(name="endpoint", help="Switch controllers, by the chassis they speak for.")
credential = App(name="credential", help="Credentials of controllers.")
Serial = Annotated[str, Parameter(name="--chassis-serial")]
Url = Annotated[str, Parameter(name="--endpoint")]


@endpoint.command(name="show")
def endpoint_show(*, chassis_serial: str | None = None, at: At = HERE, output: Output = "table") -> None:
    """Show which controller speaks for which chassis.

    Parameters
    ----------
    chassis_serial
        Only this chassis.
    output
        How to print.
    at
        Which site, and who we are.
    """
    with connect(at) as site:
        found = site.forge("ListNvlinkNmxcEndpoints", Empty()).entries
    rows = [
        (one.chassis_serial, one.endpoint) for one in found if chassis_serial in (None, one.chassis_serial)
    ]
    value = [{"chassis_serial": serial, "endpoint": url} for serial, url in rows]
    emit(value, output, lambda: columns(("CHASSIS SERIAL", "ENDPOINT"), rows))


@endpoint.command(name="create")
def endpoint_create(*, chassis_serial: Serial, url: Url, at: At = HERE) -> None:
    """Register the controller of a chassis; the site speaks to it at once.

    Parameters
    ----------
    chassis_serial
        Serial number of the chassis.
    url
        https://HOST[:PORT] of its controller.
    at
        Which site, and who we are.
    """
    _put_endpoint("CreateNvlinkNmxcEndpoint", chassis_serial, url, at)
    print(f"created {chassis_serial} -> {url}")


@endpoint.command(name="update")
def endpoint_update(*, chassis_serial: Serial, url: Url, at: At = HERE) -> None:
    """Give a chassis another controller, or another address of it.

    Parameters
    ----------
    chassis_serial
        Serial number of the chassis.
    url
        https://HOST[:PORT] of its controller.
    at
        Which site, and who we are.
    """
    _put_endpoint("UpdateNvlinkNmxcEndpoint", chassis_serial, url, at)
    print(f"updated {chassis_serial} -> {url}")


@endpoint.command(name="delete")
def endpoint_delete(*, chassis_serial: Serial, at: At = HERE) -> None:
    """Stop speaking to the controller of a chassis; what it told turns unknown.

    Parameters
    ----------
    chassis_serial
        Serial number of the chassis.
    at
        Which site, and who we are.
    """
    with connect(at) as site:
        request = pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial=chassis_serial)
        site.forge("DeleteNvlinkNmxcEndpoint", request)
    print(f"deleted {chassis_serial}")


def browse(
    *,
    chassis_serial: Serial,
    operation: Literal["compute-node-info-list", "gpu-info", "gpu-info-list"],
    gpu_uid: str = "0",
    at: At = HERE,
) -> None:
    """Print what a controller itself answers, as JSON.

    Parameters
    ----------
    chassis_serial
        Chassis whose controller is asked.
    operation
        What it is asked.
    gpu_uid
        Fabric GUID for gpu-info, decimal or 0x hexadecimal.
    at
        Which site, and who we are.
    """
    with connect(at) as site:
        print(ask(site, chassis_serial, operation, int(gpu_uid, 0)))


@credential.command(name="add")
def credential_add(
    kind: Literal["nmx-m"], *, username: str, password_file: Path | None = None, at: At = HERE
) -> None:
    """Keep the name and password of a controller in the site's secret provider.

    Parameters
    ----------
    kind
        nmx-m: the only controllers that take a password.
    username
        The name.
    password_file
        File whose first line is the password; asked for where left out.
    at
        Which site, and who we are.
    """
    request = pb.CredentialCreationRequest(
        credential_type=pb.NmxM, username=username, password=_password(password_file)
    )
    with connect(at) as site:
        site.forge("CreateCredential", request)
    print(f"kept the credential of {kind}")


def ask(site: Client, chassis_serial: str, operation: str, gpu_uid: int) -> str:
    """What a controller answers, as JSON."""
    name = f"NMXC_BROWSE_OPERATION_{operation.replace('-', '_').upper()}"
    number = pb.NmxcBrowseOperation.Value(name)
    request = pb.NmxcBrowseRequest(chassis_serial=chassis_serial, operation=number, gpu_uid=gpu_uid)
    return str(site.forge("NmxcBrowse", request).body)


def _put_endpoint(rpc: str, chassis_serial: str, url: str, at: Connection) -> None:
    with connect(at) as site:
        site.forge(rpc, pb.NvlinkNmxcEndpoint(chassis_serial=chassis_serial, endpoint=url))


def _password(file: Path | None) -> str:
    if file is not None:
        try:
            return file.read_text().partition("\n")[0]
        except OSError as error:
            raise Refused(f"cannot read {file}: {error.strerror}") from error
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\n")
    from getpass import getpass

    return getpass()
