"""The scenarios: their files, every step and every scenario that ships.

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
EXAMPLE = """\
title = "Another writer deletes our partition on the switch: the service makes it again"
seen = "another writer on the same switch"

[[step]]
do = "make-logical-partition"
name = "training"

[[step]]
do = "make-vpc"
name = "net"
logical-partition = "training"

[[step]]
do = "make-instances"
group = "job"
vpc = "net"
count = 4

[[step]]
expect = "instances"
group = "job"
status = "Ready"
within = 60

[[step]]
do = "partition-gone"
instance = "job/1"

[[step]]
expect = "together"
groups = ["job"]
within = 120
"""
FILE = f"""\
A scenario is an incident in a file: actions of tenants and users, faults, and the observations that must
follow. `rackloom twin play` plays it on the production code with simulated switches, API server, kubelets
and `nvidia-imex`. `rackloom twin schema` prints the JSON schema of these files.

## The file

```toml
{EXAMPLE}```

Keys above the steps:

| key | default | meaning |
|---|---|---|
| `title`, `seen` | required | the incident, and the report or the kind of fault behind it |
| `racks`, `profile` | 1, `gb200-nvl72` | the site |
| `processes` | 1 | 2 runs two replicas of the service on the same records, in virtual time only |
| `candidates` | 1 | 2 runs two replicas of Rackloom's controllers, and their Lease elects the leader |
| `controller` | `nmx-c` | `nmx-m` puts all racks behind one NMX-M, in virtual time only |
| `setup` | none | a shared setup whose steps come first, as below |
| `faults` | `seen` | `none` if nothing breaks in the scenario |

| setup | its end |
|---|---|
| `four-trays` | a tenant has 4 trays of a rack in one logical partition |
| `whole-rack` | the same with all 18 trays |
| `rack-job` | the same, and a user submitted a rack-wide Job with a ComputeDomain |
| `running-rack-job` | the pods of that Job run, and the ComputeDomain is Ready |

- A step starts when the step above it is over, and not before second `at`.
- An expectation is checked until it holds, for at most `within` seconds. Then it must hold for `stays` more
  seconds (default 0).
- A fault that waits for a call (`switch-mistreats`, `switch-hides`, `network-bad` on the next change,
  `service-dies`) must happen before `heal` and before the end. Otherwise the scenario fails.
- At least one expectation must depend on the faults: without them, it must fail.
- Racks, trays, GPUs and NICs have the names of the map: `rack-01/slot-2`, `rack-01/slot-2/gpu-0`. A GPU of an
  instance is `gpu-0` to `gpu-3`. The instances of a group count from 1 (`job/1`).
- An unknown step, key or name, a number that is not finite, and an end without an expectation are refused,
  with the line and the nearest fix.

The transcript has an entry for each step: its start in seconds since the first answer of the site, its
result and the observation. The exit code is 0 if every expectation was observed, else 1. After a step that
fails, no further step is tried.

## Real and virtual time

In real time (the default), the site is that of `rackloom up`: sockets on loopback, records on disk. In
virtual time (`--speed virtual`), the same service runs in an event loop whose clock jumps to the next
timer, without sockets and threads. An hour then takes seconds, the transcript is always the same, and a
scenario can set the network, the clock and the point at which the service dies. The API server takes 2 to
20 ms for an answer there. A scenario with a step that the chosen clock cannot play is refused before it
starts.

In real time, `service-killed` ends the tasks of the service in this process. Only virtual time can kill it
between any two writes.
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
    """The format, the steps, the shipped scenarios and the limits."""
    shipped = shipped_scenarios()
    parts = [
        "# Scenarios",
        made_from("the steps and the scenarios of the code"),
        FILE,
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
