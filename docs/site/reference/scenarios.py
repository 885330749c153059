"""The scenarios: every step and every scenario that ships.

The tables come from the signatures and docstrings of the steps, and from the shipped files.
"""

import msgspec
from docs.site.reference.markdown import cell, code, made_from, table

from rackloom.lab.scenario.model import ONLY_VIRTUAL, Scenario, StepKind
from rackloom.lab.scenario.reading import ACTIONS, EXPECTATIONS, shipped_scenarios

COMMON = {"at", "within", "stays"}
"""Keys that every step has."""
MODULES = (
    "tenants",
    "site_faults",
    "switch_leaders",
    "every_layer",
    "cluster_actions",
    "control_plane",
    "site_expectations",
    "cluster_expectations",
)
"""The modules of the steps, in the order of the page."""
INTRODUCTION = """\
[The twin](../docs/twin.md#scenarios) describes the file of a scenario. `rackloom twin schema` prints its
JSON schema. At least one expectation of a file must depend on its faults: without them, it must fail.

| setup | its end |
|---|---|
| `four-trays` | a tenant has 4 trays of a rack in one logical partition |
| `whole-rack` | the same with all 18 trays |
| `rack-job` | the same, and a user submitted a rack-wide Job with a ComputeDomain |
| `running-rack-job` | the pods of that Job run, and the ComputeDomain is Ready |

In virtual time, the API server takes 2 to 20 ms for an answer. In real time, `service-killed` ends the
tasks of the service in this process, and only virtual time can kill it between any two writes.
"""
EXPECTED = """\
REST is queried with the token of the tenant. "True" refers to the simulated fabric itself, which the
service cannot read. `invariants` are checked at every change of a fabric, and the check fails the next
`invariants` step: S1, S2 and S4 compare the fabrics with the answers to tenants, and S10 looks up
everything that was acknowledged. Two elected controllers that work at the same time fail the next
`invariants` or `leader` step, and the end.
"""
LIMITS = """\
- The simulated switches have no model of switch trays. A missing tray shows as degraded bandwidth of every
  GPU and partition of its rack. The report of a real NMX-C is not published.
- The answers of a real NMX-C that does not lead are not published. The simulated one answers for the
  domain, and lists neither GPUs nor partitions.
- Only the clocks of the service and of the controllers can be set. API server, kubelets and switches keep
  the true time.
- With NMX-M, requests are not mistreated, and the network neither repeats nor reorders them.
- Eviction after `tolerationSeconds` is not simulated.
- No stale list is played, because Rackloom lists without `resourceVersion`, which real servers answer from
  the newest state.
- Without `candidates = 2` there is no election.
- `api-server-bad` never reorders the changes of one object, and neither do real servers.
"""


def page() -> str:
    """The setups, the steps, the shipped scenarios and the limits."""
    shipped = shipped_scenarios()
    parts = [
        "# Scenarios",
        made_from("the steps and the scenarios of the code"),
        INTRODUCTION,
        "## Actions",
        "`?` marks optional keys.",
        table(("`do =`", "keys besides `at`", "action"), map(step_row, _in_order(ACTIONS))),
        "## Expectations",
        EXPECTED,
        table(
            ("`expect =`", "keys besides `at`, `within`, `stays`", "expectation"),
            map(step_row, _in_order(EXPECTATIONS)),
        ),
        "## Shipped scenarios",
        table(("scenario", "incident", "report, or kind of fault"), map(scenario_row, shipped)),
        "## Limits",
        LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


def _in_order(kinds: dict[str, StepKind]) -> list[StepKind]:
    """By module, because the order of imports is arbitrary."""
    return sorted(kinds.values(), key=lambda kind: MODULES.index(kind.struct.__module__.rpartition(".")[2]))


def step_row(kind: StepKind) -> tuple[str, str, str]:
    """The word of a step, its keys and its documentation."""
    fields = [field for field in msgspec.structs.fields(kind.struct) if field.name not in COMMON]
    keys = ", ".join(f"{code(field.encode_name)}{'' if field.required else '?'}" for field in fields)
    return code(kind.name), keys, cell(kind.doc) + " (virtual time)" * (kind.speeds == ONLY_VIRTUAL)


def scenario_row(scenario: Scenario) -> tuple[str, str, str]:
    """The name of a scenario with its clocks, its title and its origin."""
    speeds = ", ".join(speed for speed in ("real", "virtual") if speed in scenario.speeds)
    return f"{code(scenario.name)} ({speeds})", cell(scenario.title), cell(scenario.seen)
