"""The report of mutation testing: which survivors are explained, and the scores of the page."""

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
PAGE = """
| `core/domains/membership.py`, who left | 9 | 9 | 0 | 100 % |
| `carve/reconcile/leases.py` | 8 | 8 | 0 | 100 % |

```diff
@@ core.domains.membership.abandoned_nodes
-now = epoch_seconds(snapshot.now) or 0.0
+now = epoch_seconds(snapshot.now) or 1.0
-obj = {
-    "a": 0,
+obj = {
+    "a": 1,
@@ carve.reconcile.leases.LeaseGuard.extend
-if at < end:
+if at <= end:
```
"""


def test_a_survivor_is_explained_by_its_function_and_its_change() -> None:
    found = report.mutant_of(NAME, SHOWN)
    assert found.text() == (
        "@@ core.domains.membership.abandoned_nodes\n"
        "-now = epoch_seconds(snapshot.now) or 0.0\n"
        "+now = epoch_seconds(snapshot.now) or 1.0"
    )
    explained = report.explained_mutants(PAGE)
    assert len(explained) == 3
    assert found in explained
    assert found._replace(after=("now = epoch_seconds(snapshot.now) or 2.0",)) not in explained
    assert found._replace(function="core.domains.membership.seconds_to_next_loss") not in explained


def test_the_scores_of_modules_that_were_run_as_a_whole_are_written() -> None:
    scored = report.with_scores(PAGE, report.outcomes_by_module(LISTING))
    assert "| `core/domains/membership.py`, who left | 3 | 2 | 1 | 66.7 % |" in scored
    assert "| `carve/reconcile/leases.py` | 8 | 8 | 0 | 100 % |" in scored


@pytest.mark.parametrize("also", ["", "@@ core.domains.membership.abandoned_nodes\n-a\n+b\n"])
def test_it_fails_for_a_survivor_that_the_page_does_not_have(
    also: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "mutation.md"
    page.write_text(PAGE.replace("abandoned_nodes\n", "another\n") if also else PAGE)
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "_mutmut", lambda *words: SHOWN if words[0] == "show" else LISTING)
    assert report.main() == (1 if also else 0)
    reported = capsys.readouterr().err
    assert ("+now = epoch_seconds(snapshot.now) or 1.0" in reported) is bool(also)
    assert "66.7 %" in page.read_text()


def test_it_fails_where_nothing_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_mutmut", lambda *words: f"{NAME}: not checked")
    assert report.main() == 1


def test_what_the_page_explains_is_in_the_code() -> None:
    for mutant in report.explained_mutants(report.PAGE.read_text()):
        module = next(
            path
            for path in (ROOT / "src/rackloom").rglob("*.py")
            if mutant.function.startswith(
                str(path.relative_to(ROOT / "src/rackloom").with_suffix("")).replace("/", ".") + "."
            )
        )
        lines = {line.strip() for line in module.read_text().splitlines()}
        assert lines.issuperset(mutant.before), mutant.text()
