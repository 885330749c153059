"""The IMEX plugin killed at every single point of its work, and started again."""

import pytest
from tests.claim.node.crash_points import ENDINGS, FusedApi, Lives, deaths_survived

from rackloom.claim.node.run import PluginProcess
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import Readiness


class ImexLives(Lives):
    """A channel, and the daemon that it waits for."""

    def __init__(self, imex, monkeypatch):
        super().__init__(imex.kit, monkeypatch)
        self.imex = imex

    async def set_up(self):
        await self.kit.boot()
        self.uid = await self.imex.domain()
        await self.imex.ready(self.uid, status=Readiness.READY)
        self.claims = (await self.imex.channel("work", self.uid), await self.imex.daemon("daemon", self.uid))

    async def start(self):
        home = self.kit.places.home(names.IMEX_DRIVER)
        home.mkdir(parents=True, exist_ok=True)
        api = FusedApi(self.imex.api, self.fuse)
        return PluginProcess(self.imex.plugin(api), api, self.kit.host())

    def edits(self, uid):
        return self.imex.edits(uid)

    async def check_held(self):
        assert await self.imex.label() == self.uid

    async def check_untouched(self):
        assert await self.imex.label() is None


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_killed_at_any_point_nothing_is_orphaned(ending, make_imex):
    assert deaths_survived(lambda monkeypatch: ImexLives(make_imex(), monkeypatch), ending) > 40
