"""What `make mutate` found: the score of each module, and the mutants that no test kills.

A mutant counts as killed if a test fails with it or does not end in time. One that no test calls
counts as survived. `docs/mutation.md` has the score of each module and, in blocks of kind `diff`,
every survivor with its change; the text above a block says why no test can notice it. A mutant is
recognised by its function and its change, because its number moves with each edit of the function.

The report rewrites the scores on that page, for modules of which all mutants were run. It ends with
status 1 if nothing was run or a mutant survives that the page does not have, and prints such mutants
as they would stand there.
"""

import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "mutation.md"
PACKAGE = "rackloom."
KILLED = ("killed", "timeout")
SURVIVED = ("survived", "no tests", "suspicious", "segfault")
NOT_RUN = "not checked"
_BLOCK = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(
    r"^\| `(?P<path>[\w/]+\.py)`(?P<note>[^|]*) \| \d+ \| \d+ \| \d+ \| [\d.]+ % \|$", re.MULTILINE
)


class Mutant(NamedTuple):
    """One change of one function; the lines without their indentation."""

    function: str
    """With its module, as in `core.domains.membership.abandoned_nodes`."""
    before: tuple[str, ...]
    after: tuple[str, ...]

    def text(self) -> str:
        """As it stands on the page."""
        return "\n".join(
            [f"@@ {self.function}", *map("-{}".format, self.before), *map("+{}".format, self.after)]
        )


def outcomes_by_module(listing: str) -> dict[str, dict[str, str]]:
    """Module -> mutant -> outcome, from `mutmut results`."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for line in listing.splitlines():
        name, _, outcome = line.strip().partition(": ")
        if outcome:
            found[name.rpartition(".")[0].removeprefix(PACKAGE)][name] = outcome
    return dict(sorted(found.items()))


def function_of(name: str) -> str:
    """The function of a mutant, from the name that mutmut gives it: `MODULE.x_FUNCTION__mutmut_NUMBER`."""
    module, _, mangled = name.removeprefix(PACKAGE).rpartition(".")
    mangled = mangled.rpartition("__mutmut_")[0]
    in_class = mangled.startswith("xǁ")
    return f"{module}.{mangled[2:].replace('ǁ', '.') if in_class else mangled.removeprefix('x_')}"


def mutant_of(name: str, diff: str) -> Mutant:
    """The mutant, from the diff that `mutmut show` prints."""
    _, _, hunks = diff.partition("\n@@")
    return Mutant(function_of(name), *_changed_lines(hunks.splitlines()))


def explained_mutants(page: str) -> set[Mutant]:
    """The mutants of which the page says why no test notices them."""
    found = set()
    for block in _BLOCK.findall(page):
        function = ""
        lines: list[str] = []
        for line in [*block.splitlines(), "@@ "]:
            starts_another = line.startswith("-") and any(earlier.startswith("+") for earlier in lines)
            if lines and (starts_another or line.startswith("@@ ")):
                found.add(Mutant(function, *_changed_lines(lines)))
                lines = []
            if line.startswith("@@ "):
                function = line.removeprefix("@@ ")
            else:
                lines.append(line)
    return found


def _changed_lines(lines: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _marked("-", lines), _marked("+", lines)


def _marked(mark: str, lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(line[1:].strip() for line in lines if line.startswith(mark))


def with_scores(page: str, found: Mapping[str, Mapping[str, str]]) -> str:
    """The page with the scores of the modules of which all mutants were run."""

    def row(old: re.Match[str]) -> str:
        outcomes = found.get(old["path"].removesuffix(".py").replace("/", "."), {})
        killed, survived = _counted(outcomes)
        if not outcomes or killed + survived < len(outcomes):
            return old[0]
        score = f"{100 * killed / len(outcomes):.1f}".removesuffix(".0")
        return f"| `{old['path']}`{old['note']} | {len(outcomes)} | {killed} | {survived} | {score} % |"

    return _ROW.sub(row, page)


def _counted(outcomes: Mapping[str, str]) -> tuple[int, int]:
    """How many were killed, and how many survived."""
    counted = Counter(outcomes.values())
    return sum(counted[outcome] for outcome in KILLED), sum(counted[outcome] for outcome in SURVIVED)


def _table(found: Mapping[str, Mapping[str, str]]) -> str:
    lines = [f"{'module':45} {'mutants':>7} {'killed':>6} {'survived':>8} {'not run':>7} {'score':>6}"]
    for module, outcomes in found.items():
        killed, survived = _counted(outcomes)
        run = killed + survived
        score = f"{killed / run:6.1%}" if run else f"{'-':>6}"
        lines.append(f"{module:45} {len(outcomes):7} {killed:6} {survived:8} {len(outcomes) - run:7} {score}")
    return "\n".join(lines)


def _mutmut(*words: str) -> str:
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Print and record what was found; returns the exit status."""
    found = outcomes_by_module(_mutmut("results", "--all", "true"))
    page = PAGE.read_text()
    PAGE.write_text(with_scores(page, found))
    print(_table(found))
    if all(outcome == NOT_RUN for outcomes in found.values() for outcome in outcomes.values()):
        print("No mutant was run.", file=sys.stderr)
        return 1
    names = [name for outcomes in found.values() for name, outcome in outcomes.items() if outcome in SURVIVED]
    survivors = {mutant_of(name, _mutmut("show", name)): name for name in names}
    explained = explained_mutants(page)
    unexplained = [(name, mutant) for mutant, name in survivors.items() if mutant not in explained]
    print(f"{len(survivors) - len(unexplained)} survivors that {PAGE.name} explains")
    for name, mutant in unexplained:
        print(f"\n{name} survives, and {PAGE.name} does not say why:\n{mutant.text()}", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
