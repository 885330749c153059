"""All three plugins of a node in one process: less memory than three, and one fate.

Each plugin keeps its sockets, its checkpoint and its CDI specs, as in a separate process, and kubelet knows
three plugins. They share the largest users of memory: the interpreter, the gRPC and Kubernetes libraries, and
one client of the API server. Probes and metrics are answered for all of them at one address: the process is
ready when each plugin is, and serves while each does. When one fails, all end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from msgspec.structs import replace
from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from rackloom.app.node.gpu import GpuOptions, gpu_node
from rackloom.app.node.imex import ImexOptions, imex_node
from rackloom.app.node.nic import NicOptions, nic_node
from rackloom.app.node.process import NodeOptions, plugin_listeners, serve_plugin
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.run import PluginProcess


def run_together(
    common: NodeOptions,
    imex: ImexOptions,
    gpu: GpuOptions,
    nic: NicOptions,
    announce: Callable[[str], None],
) -> None:
    """Serve IMEX channels, GPUs and NICs until SIGTERM or SIGINT."""
    serve = partial(all_nodes, common, imex, gpu, nic)
    asyncio.run(serve_plugin(common, "node", serve, announce))


@asynccontextmanager
async def all_nodes(
    common: NodeOptions, imex: ImexOptions, gpu: GpuOptions, nic: NicOptions, api: KubeApi
) -> AsyncIterator["PluginsTogether"]:
    """The three plugins of one node, serving while the context is entered. Raises `Refused`."""
    alone = replace(common, listen=None, health_listen=None)
    async with AsyncExitStack() as stack:
        plugins = PluginsTogether(
            [
                await stack.enter_async_context(node)
                for node in (
                    imex_node(alone, imex, api),
                    gpu_node(alone, gpu, api),
                    nic_node(alone, nic, api),
                )
            ]
        )
        await stack.enter_async_context(plugin_listeners(common, plugins))
        yield plugins


class PluginsTogether:
    """Several plugins as one service."""

    def __init__(self, plugins: Sequence[PluginProcess]) -> None:
        self.plugins = plugins

    def metrics_page(self) -> bytes:
        """The page that Prometheus reads: every series names its driver, or is of one plugin alone."""
        for plugin in self.plugins:
            plugin.metrics_page()  # brings the counts of devices up to date
        merged = CollectorRegistry()
        merged.register(_MergedMetrics([plugin.metrics.registry for plugin in self.plugins]))
        return generate_latest(merged)

    def not_ready(self) -> str | None:
        """The reason of each plugin that is not ready."""
        reasons = (plugin.not_ready() for plugin in self.plugins)
        return "; ".join(reason for reason in reasons if reason is not None) or None

    async def is_serving(self) -> bool:
        """Whether kubelet would get an answer of each now."""
        return all(await asyncio.gather(*(plugin.is_serving() for plugin in self.plugins)))

    async def fails(self) -> None:
        """Wait until background work of one fails, and raise why."""
        waiting = [asyncio.ensure_future(plugin.fails()) for plugin in self.plugins]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()


class _MergedMetrics(Collector):
    """Series of one name from several registries under one heading."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are not checked for collisions, which are the point."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Each metric once."""
        found: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                known = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                known.samples += metric.samples
        return iter(found.values())
