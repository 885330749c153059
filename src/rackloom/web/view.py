"""The content of a page's address: the colours, their filter, the opened racks, and the chosen GPU.

Every state of the page that a viewer may want to share is in its address, so that a view is a link:
`/?by=tenant&rack=rack-07&gpu=r0123456789ab-3-1`. Racks are named as people name them. A GPU is named by the
id of its element on the page, and its rack is opened too. Any other name of a GPU leads to that address:
`/?gpu=rack-07/slot-2/gpu-1`. An address may name objects that do not exist.

The path states which time is shown: `/` is the present, and `/map/at/2026-11-26T14:05:00Z` is the site as it
was. All links are relative to the path (`?by=tenant`), so that a link of a page leads to the same time.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import urlencode

import msgspec
from starlette.datastructures import QueryParams

from rackloom.web.frames import ColourMode
from rackloom.web.highlight import MARK
from rackloom.web.model import rack_id
from rackloom.web.racks import GpuAddress

WHOLE_RACKS = 8
"""The most racks of a site that is drawn whole. On a larger site, only opened racks are drawn whole."""
MAX_OPENED = 8
"""Racks that one address may open."""
_GPU_ID = re.compile(r"(r[0-9a-f]{12})-([0-9]{1,4})-([0-9]{1,4})")


class PageView(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one page."""

    mode: ColourMode
    racks: tuple[str, ...] = ()
    """Names of the racks that are opened."""
    gpu: str = ""
    """Id of the chosen GPU. Empty if none is chosen."""
    only: str = ""
    """Mark of the entry of the legend that keeps its colours. Empty if all do."""

    @property
    def opened(self) -> frozenset[str]:
        """Ids of the racks that are opened, that of the chosen GPU too."""
        chosen = gpu_address(self.gpu)
        return frozenset(map(rack_id, self.racks)) | ({chosen[0]} if chosen is not None else set())

    def query(self, mode: ColourMode | None = None) -> str:
        """The address of this view, from the `?` on, in the colours of another mode if one is given.

        Other colours have another legend, so they keep no filter.
        """
        racks = [("rack", name) for name in self.racks]
        gpu = [("gpu", self.gpu)] if self.gpu else []
        only = [("only", self.only)] if self.only and mode in (None, self.mode) else []
        return "?" + urlencode([("by", mode or self.mode), *racks, *gpu, *only])

    def with_rack_of_gpu(self, names: Mapping[str, str]) -> "PageView":
        """The view that names the rack of the chosen GPU too. `names` are those of all racks by id."""
        chosen = gpu_address(self.gpu)
        name = None if chosen is None else names.get(chosen[0])
        if name is None or name in self.racks:
            return self
        return msgspec.structs.replace(self, racks=(*self.racks, name))

    @property
    def unchosen(self) -> "PageView":
        """The view without a chosen GPU. Its rack stays open."""
        return msgspec.structs.replace(self, gpu="")

    @property
    def unfiltered(self) -> "PageView":
        """The view in all colours."""
        return msgspec.structs.replace(self, only="")

    def without(self, name: str) -> "PageView":
        """The view with one rack closed, and the choice of a GPU in it given up."""
        chosen = gpu_address(self.gpu)
        gone = chosen is not None and chosen[0] == rack_id(name)
        left = tuple(rack for rack in self.racks if rack != name)
        return msgspec.structs.replace(self, racks=left, gpu="" if gone else self.gpu)


def page_view(asked: QueryParams, racks: int) -> PageView:
    """The view that an address names, on a site with this number of racks."""
    by, gpu, only = asked.get("by"), asked.get("gpu", ""), asked.get("only", "")
    usual = ColourMode.PARTITION if racks <= WHOLE_RACKS else ColourMode.USE
    return PageView(
        mode=ColourMode(by) if by in set(ColourMode) else usual,
        racks=tuple(dict.fromkeys(name for name in asked.getlist("rack") if name))[:MAX_OPENED],
        gpu=gpu if gpu_address(gpu) is not None else "",
        only=only if MARK.fullmatch(only) else "",
    )


_PRESENT, _BELOW = "/", "/map"
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_TIMES = (_TIME, "%Y-%m-%dT%H:%MZ", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M")
"""Times in an address, in UTC. A browser's form for a time leaves out the Z."""


def time_of_address(text: str) -> float | None:
    """The time that an address names, in seconds since the epoch, or None if it names none."""
    for form in _TIMES:
        with suppress(ValueError):
            return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
    return None


def page_path(at: float | None = None) -> str:
    """The path of the page that shows the site at a time, to the second, or the present for None."""
    return _PRESENT if at is None else path_below(at)


def path_below(at: float | None = None) -> str:
    """The path below which GPUs, search and export of that page are."""
    return _BELOW if at is None else f"{_BELOW}/at/{datetime.fromtimestamp(at, UTC).strftime(_TIME)}"


def gpu_address(id_: str) -> GpuAddress | None:
    """The GPU that the id of a page element names, or None if it names none."""
    found = _GPU_ID.fullmatch(id_)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def rack_link(mode: ColourMode, name: str) -> str:
    """The address of a page that opens one rack, at that rack."""
    return f"{PageView(mode=mode, racks=(name,)).query()}#{rack_id(name)}"


def gpu_link(mode: ColourMode, id_: str) -> str:
    """The address of a page on which one GPU is chosen, at that GPU."""
    return f"{PageView(mode=mode, gpu=id_).query()}#{id_}"
