"""Querying the cloud's metadata service, beside everything else that the plugin does.

`CloudWatcher` reads in the background: NICs are published at once, and again when the attributes are there.
A reading has four seconds in all, and an answer has a limit. No proxy of the environment is used and no
redirect followed, so that only the service itself is queried. A reading that fails keeps the last
values, is logged, and is tried again after 5 seconds, then after twice as long each time, up to ten minutes.
One that succeeds is made again after ten minutes: machines move, and NICs come.

The machine's firmware identifies the cloud (`detect_cloud`), or the operator does (`--cloud`). On other
machines no request is made: another host may have the address there.
"""

import asyncio
from collections.abc import Callable

import httpx2
import structlog

from rackloom.core.nics.cloud import (
    CLOUD_ATTRIBUTES,
    NO_CLOUD_ATTRIBUTES,
    READERS,
    RETRY_SECONDS,
    Cloud,
    CloudAttributes,
    FirmwareIdentity,
    MetadataAnswer,
    MetadataRequest,
    cloud_of_host,
)
from rackloom.errors import Retry
from rackloom.topology.discovery.sysfs import Sysroot

log = structlog.get_logger(__name__)

METADATA_SERVICE = "http://169.254.169.254"
"""The same address in all four clouds. Google's name for it would need a DNS server."""
READING_SECONDS = 4.0
"""For all requests of one reading."""
LONGEST_ANSWER = 256 * 1024
"""Bytes. The list of 32 interfaces with all their aliases is some 20 KiB."""
AGAIN_SECONDS = 600.0
"""From one reading to the next."""
_DMI = "/sys/class/dmi/id"


def detect_cloud(sysroot: Sysroot) -> Cloud | None:
    """Detect the cloud by the files that firmware fills. None outside the supported clouds."""
    return cloud_of_host(
        FirmwareIdentity(
            sys_vendor=sysroot.text(f"{_DMI}/sys_vendor"),
            product_name=sysroot.text(f"{_DMI}/product_name"),
            chassis_asset_tag=sysroot.text(f"{_DMI}/chassis_asset_tag"),
        )
    )


async def read_metadata(cloud: Cloud, service: str = METADATA_SERVICE) -> CloudAttributes:
    """One reading. Raises `Retry` with the reason if it fails."""
    try:
        async with (
            asyncio.timeout(READING_SECONDS),
            httpx2.AsyncClient(trust_env=False, follow_redirects=False, timeout=READING_SECONDS) as client,
        ):
            reading = READERS[cloud]()
            request = next(reading)
            while True:
                request = reading.send(await _ask(client, service, request))
    except StopIteration as found:
        attributes: CloudAttributes = found.value
        return attributes
    except TimeoutError as error:
        reason = f"the metadata service does not answer within {READING_SECONDS:.0f} s"
        raise Retry(reason, after=RETRY_SECONDS) from error
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        reason = f"the metadata service cannot be asked: {error or type(error).__name__}"
        raise Retry(reason, after=RETRY_SECONDS) from error


async def _ask(client: httpx2.AsyncClient, service: str, request: MetadataRequest) -> MetadataAnswer:
    headers = {**request.headers, "Accept-Encoding": "identity"}
    async with client.stream(request.method, service + request.path, headers=headers) as response:
        content = bytearray()
        async for part in response.aiter_raw():
            content += part
            if len(content) > LONGEST_ANSWER:
                reason = f"{request.path} is answered with more than {LONGEST_ANSWER} bytes"
                raise Retry(reason, after=RETRY_SECONDS)
        return MetadataAnswer(
            status=response.status_code,
            text=content.decode(errors="replace"),
            headers={name.lower(): value for name, value in response.headers.items()},
        )


class CloudWatcher:
    """Keeps one cloud's attributes of this node."""

    def __init__(self, cloud: Cloud, service: str = METADATA_SERVICE) -> None:
        self.known = NO_CLOUD_ATTRIBUTES
        """As it was last read."""
        self.cloud = cloud
        self._service = service

    async def watch(self, wake: Callable[[], None]) -> None:
        """Read forever, and call `wake` whenever something has changed."""
        pause = RETRY_SECONDS
        while True:
            try:
                found = await read_metadata(self.cloud, self._service)
            except Retry as trouble:
                log.warning("nic.cloud-not-read", cloud=self.cloud, reason=trouble.reason, again_in=pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, AGAIN_SECONDS)
                continue
            if found != self.known:
                self.known = found
                absent = [name for name in CLOUD_ATTRIBUTES[self.cloud] if name not in found.names()]
                log.info("nic.cloud-read", cloud=self.cloud, known=sorted(found.names()), absent=absent)
                wake()
            pause = RETRY_SECONDS
            await asyncio.sleep(AGAIN_SECONDS)
