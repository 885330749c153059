"""The metrics: those of a site and of a transfer from registries, others from the code."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from docs.site.reference.markdown import cell, code, made_from, table
from docs.site.reference.source_trees import calls, constant, modules
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from rackloom.app.config import MetricsConfig
from rackloom.app.site.metrics import SiteMetrics
from rackloom.app.transfer_textfile import transfer_registry

SITE, TRANSFER = "app/site/metrics.py", "app/transfer_textfile.py"
PROCESSES = {
    SITE: "`rackloom serve` and `rackloom up`",
    "app/controller.py": "`rackloom controller`",
    "claim/cluster/gang_controller.py": "`rackloom controller`",
    "app/webhook.py": "`rackloom webhook`",
    "claim/node/prepare.py": "`rackloom node`, each plugin",
    "app/node/nic.py": "`rackloom node nic`",
    "claim/node/nic/renewal.py": "`rackloom node nic`",
    "claim/node/nic/status.py": "`rackloom node nic`",
    "claim/node/nri/client.py": "`rackloom node nic`",
    "app/doctor_metrics.py": "`rackloom doctor --textfile`, and the site service with its newest examination",
    TRANSFER: "`rackloom transfer run --textfile`",
}
"""Which processes show the metrics that a module makes."""
_KINDS = {"Counter": "counter", "Gauge": "gauge", "Histogram": "histogram"}


@dataclass(frozen=True)
class Metric:
    """A metric: its name as scraped, its kind, its labels, and what it says."""

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str


def page() -> str:
    """Every metric, by process. Raises ValueError where a metric cannot be read from the code."""
    prefix = MetricsConfig().prefix
    registries = {SITE: SiteMetrics(prefix).registry, TRANSFER: transfer_registry(None, 0)}
    by_process = {PROCESSES[module]: list(of_registry(registry)) for module, registry in registries.items()}
    for module, metric in of_code():
        by_process.setdefault(PROCESSES[module], []).append(metric)
    parts = [
        "# Metrics",
        made_from("the registries and declarations of the metrics"),
        f"`{prefix}` is the default of `metrics.prefix`. A histogram also has `_bucket`, `_sum` and "
        "`_count`. [monitoring.md](../docs/monitoring.md) says how to read those of a site, and which "
        "alerts use them.",
    ]
    for process, found in by_process.items():
        rows = [(code(m.name), m.kind, ", ".join(map(code, m.labels)), cell(m.about)) for m in found]
        parts += [f"## {process}", table(("metric", "kind", "labels", "what it says"), rows)]
    return "\n\n".join(parts) + "\n"


def of_registry(registry: CollectorRegistry) -> Iterator[Metric]:
    """The metrics of a registry."""
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            kind = collector._type
            name = f"{collector._name}_total" if kind == "counter" else collector._name
            yield Metric(name, kind, tuple(collector._labelnames), collector._documentation)


def of_code() -> Iterator[tuple[str, Metric]]:
    """The metrics that other modules declare. ValueError for a module that `PROCESSES` does not name."""
    for module, tree in modules():
        makers = _makers(tree)
        if not makers or module in (SITE, TRANSFER):
            continue
        if module not in PROCESSES:
            raise ValueError(
                f"{module} has metrics, and docs/site/reference/metrics.py does not say of which process"
            )
        functions = (
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        for function in functions:
            for name, call in calls(function):
                if name in makers and call.args:
                    yield module, _declared(module, makers[name], call, _texts(function))


def _makers(tree: ast.Module) -> dict[str, str]:
    """The names by which a module makes metrics, with their kinds: imported, or bound by `partial`."""
    made = {
        alias.asname or alias.name: _KINDS[alias.name]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "prometheus_client"
        for alias in node.names
        if alias.name in _KINDS
    }
    if not made:
        return {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node):
                if isinstance(target, ast.Name) and isinstance(value, ast.Call) and value.args:
                    bound = value.args[0]
                    if (
                        ast.unparse(value.func) == "partial"
                        and isinstance(bound, ast.Name)
                        and bound.id in made
                    ):
                        made[target.id] = made[bound.id]
    return made


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    (target, value) = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _texts(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
    """The values of the names in a function: help texts and labels sometimes get a name first."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            found.update({t.id: value for t, value in _pairs(node) if isinstance(t, ast.Name)})
    return found


def _declared(module: str, kind: str, call: ast.Call, named: dict[str, ast.expr]) -> Metric:
    def resolved(index: int) -> ast.expr | None:
        node = call.args[index] if len(call.args) > index else None
        return named.get(node.id, node) if isinstance(node, ast.Name) else node

    name, about, labels = constant(resolved(0)), constant(resolved(1)), resolved(2)
    if name is None or about is None:
        raise ValueError(f"{module}:{call.lineno}: the name or the help text of a metric cannot be read")
    names = tuple(map(str, ast.literal_eval(labels))) if labels is not None else ()
    return Metric(f"{name}_total" if kind == "counter" else name, kind, names, about)
