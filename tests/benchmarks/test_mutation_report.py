"""The report of mutation testing: the explained survivors, and the scores."""

from pathlib import Path

import benchmarks.mutation as report
import pytest

ROOT = Path(__file__).parents[2]
LISTING = """
    rackloom.core.domains.membership.x_abandoned_nodes__mutmut_3: killed
    rackloom.core.domains.membership.x_abandoned_nodes__mutmut_4: survived
    rackloom.core.domains.membership.x__written__mutmut_7: timeout
    rackloom.carve.reconcile.leases.xǁLeaseGuardǁextend__mutmut_9: not checked
    rackloom.carve.reconcile.leases.xǁLeaseGuardǁextend__mutmut_10: killed
"""
SHOWN = '''# rackloom.core.domains.membership.x_abandoned_nodes__mutmut_4: survived
--- src/rackloom/core/domains/membership.py
+++ src/rackloom/core/domains/membership.py
@@ -3,7 +3,7 @@
     None in channel mode, where the controller cannot see on which nodes a job runs.
     """
-    now = epoch_seconds(snapshot.now) or 0.0
+    now = epoch_seconds(snapshot.now) or 1.0
     lost = (name for name, since in snapshot.unready.items() if now - since >= after)
'''
NAME = "rackloom.core.domains.membership.x_abandoned_nodes__mutmut_4"
EXPLAINED = """
# The clock of a test starts later.
@@ core.domains.membership.abandoned_nodes
-now = epoch_seconds(snapshot.now) or 0.0
+now = epoch_seconds(snapshot.now) or 1.0
-obj = {
-    "a": 0,
+obj = {
+    "a": 1,

# It is equal for all times.
@@ carve.reconcile.leases.LeaseGuard.extend
-if at < end:
+if at <= end:
"""


def test_a_survivor_is_explained_by_its_function_and_its_change() -> None:
    found = report.mutant_of(NAME, SHOWN)
    assert found.text() == (
        "@@ core.domains.membership.abandoned_nodes\n"
        "-now = epoch_seconds(snapshot.now) or 0.0\n"
        "+now = epoch_seconds(snapshot.now) or 1.0"
    )
    explained = report.explained_mutants(EXPLAINED)
    assert len(explained) == 3
    assert found in explained
    assert found._replace(after=("now = epoch_seconds(snapshot.now) or 2.0",)) not in explained
    assert found._replace(function="core.domains.membership.seconds_to_next_loss") not in explained


@pytest.mark.parametrize("also", ["", "@@ core.domains.membership.abandoned_nodes\n-a\n+b\n"])
def test_it_fails_for_a_survivor_that_the_file_does_not_have(
    also: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "surviving_mutants.diff"
    file.write_text(EXPLAINED.replace("abandoned_nodes\n", "another\n") if also else EXPLAINED)
    monkeypatch.setattr(report, "EXPLAINED", file)
    monkeypatch.setattr(report, "_mutmut", lambda *words: SHOWN if words[0] == "show" else LISTING)
    assert report.main() == (1 if also else 0)
    printed = capsys.readouterr()
    assert ("+now = epoch_seconds(snapshot.now) or 1.0" in printed.err) is bool(also)
    scores = {line.split()[0]: line.split()[1:] for line in printed.out.splitlines()}
    assert scores["core.domains.membership"] == ["3", "2", "1", "0", "66.7%"]
    assert scores["carve.reconcile.leases"] == ["2", "1", "0", "1", "100.0%"]


def test_it_fails_where_nothing_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_mutmut", lambda *words: f"{NAME}: not checked")
    assert report.main() == 1


def test_each_explained_change_is_of_a_line_in_the_code() -> None:
    explained = report.explained_mutants(report.EXPLAINED.read_text())
    assert len(explained) == 8
    for mutant in explained:
        module = next(
            path
            for path in (ROOT / "src/rackloom").rglob("*.py")
            if mutant.function.startswith(
                str(path.relative_to(ROOT / "src/rackloom").with_suffix("")).replace("/", ".") + "."
            )
        )
        lines = {line.strip() for line in module.read_text().splitlines()}
        assert lines.issuperset(mutant.before), mutant.text()
