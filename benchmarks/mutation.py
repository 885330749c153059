"""What `make mutate` found: the score of each module, and the mutants that no test kills.

A mutant counts as killed if a test fails with it or does not end in time. One that no test calls counts as
survived. `mutmut show NAME` prints what a mutant changes.
"""

import subprocess
import sys
from collections import Counter, defaultdict

KILLED = ("killed", "timeout")
SURVIVED = ("survived", "no tests", "suspicious", "segfault")


def main() -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "mutmut", "results", "--all", "true"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    survivors: list[str] = []
    for line in listing.splitlines():
        name, _, outcome = line.strip().partition(": ")
        outcomes[name.rpartition(".")[0]][outcome] += 1
        if outcome in SURVIVED:
            survivors.append(f"{outcome}: {name}")
    print(*survivors, sep="\n")
    print(f"{'module':45} {'mutants':>7} {'killed':>6} {'survived':>8} {'not run':>7} {'score':>6}")
    for module, found in sorted(outcomes.items()):
        killed = sum(found[outcome] for outcome in KILLED)
        survived = sum(found[outcome] for outcome in SURVIVED)
        score = f"{killed / (killed + survived):6.1%}" if killed + survived else f"{'-':>6}"
        rest = found.total() - killed - survived
        print(f"{module:45} {found.total():7} {killed:6} {survived:8} {rest:7} {score}")


if __name__ == "__main__":
    main()
