"""The generated references match the running program: its help, answers, registries and objects."""

import json
import re

import pytest
from deploy.kubernetes.rights import INSTALLED, accounts, documents
from docs.site import pages
from docs.site.reference import __main__ as printing
from docs.site.reference import commands, conditions, metrics, resources, rest, rights, runbooks, settings
from tests.app.setting_names import setting_names
from tests.docs.markdown import PAGES, ROOT

from rackloom.carve.api import access
from rackloom.carve.api.app import ROUTES
from rackloom.cli.main import app
from rackloom.core.diagnosis.catalogue import Check, runbook_name
from rackloom.core.domains.crds import domain_crds
from rackloom.core.gangs.crd import gang_crd


def spans(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def every_command(application=app, words=("rackloom",)):
    """The words of each command, groups too."""
    yield words
    for name in application:
        if not name.startswith("-"):
            yield from every_command(application[name], (*words, name))


@pytest.mark.slow
def test_every_command_has_a_heading_and_all_its_options() -> None:
    page = commands.page()
    sections = dict(re.findall(r"^#{2,4} (rackloom .*)\n((?:(?!^#).*\n)*)", page, re.MULTILINE))
    found = {" ".join(words) for words in every_command()} - {"rackloom"}
    assert set(sections) == found
    for name, text in sections.items():
        command = app
        for word in name.split()[1:]:
            command = command[word]
        if command.default_command is not None:
            names = {n for argument in command.assemble_argument_collection() for n in argument.names[:1]}
            assert {n for n in names if n.startswith("--") and n not in text} == set(), name


def test_every_setting_is_there_with_its_default() -> None:
    page = settings.page()
    rows = re.findall(r"^\| `([a-z_.]+)` \| .*? \| `(.*?)` \| (.*?) \| (?:`(\w+)`)? ?\|$", page, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(setting_names())
    documented = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", PAGES["docs/operating.md"], re.MULTILINE))
    for name, default, _, variable in rows:
        by_hand = documented[name].strip("`")
        if by_hand in ("required", "unset"):
            assert default == by_hand, name
        assert variable in ("", f"RACKLOOM_{name.upper().replace('.', '__')}")


@pytest.mark.slow
def test_every_operation_of_rest_is_there_with_its_roles() -> None:
    page = rest.page()
    headings = set(re.findall(r"^### ([A-Z]+ /.*)$", page, re.MULTILINE))
    routes = {
        f"{method} {route.path.removeprefix(access.BASE)}"
        for route in ROUTES
        for method in route.methods or ()
    }
    assert headings == routes
    operations = {op["operationId"]: op for path in rest.document()["paths"].values() for op in path.values()}
    for name, operation in operations.items():
        section = page[page.index(f"`{name}`") :].partition("\n### ")[0]
        assert set(operation.get("x-rackloom-roles", ())) <= spans(section)


def test_every_field_of_the_custom_resources_is_there() -> None:
    installed = list(resources.definitions())
    assert installed == json.loads(json.dumps([*domain_crds(), gang_crd()]))
    page = resources.page()
    for definition in installed:
        assert f"## {definition['spec']['names']['kind']}\n" in page
    for name in ("spec.channel.allocationMode", "status.nodes[].cliqueID", "status.conditions[].reason"):
        assert f"| `{name}` |" in page


def used_in_monitoring() -> set[str]:
    """Names of metrics in the alerts and dashboards that are installed."""
    files = [
        path for path in (ROOT / "deploy" / "monitoring").rglob("*") if path.suffix in (".yaml", ".json")
    ]
    texts = "\n".join(path.read_text() for path in files if not path.name.endswith(".test.yaml"))
    return set(
        re.findall(r"\b((?:nico|rackloom|nvidia_dra)_\w+?)(?:_bucket|_sum|_count)?(?=[{\[\s)])", texts)
    )


@pytest.mark.slow
def test_every_metric_that_an_alert_or_a_panel_reads_is_there() -> None:
    known = spans(metrics.page())
    histograms = {name for name in known if name.endswith(("_seconds", "_milliseconds"))}
    read = {name for name in used_in_monitoring() if not name.endswith(("_test", "_site"))}
    assert len(read) > 15
    assert {name for name in read if name not in known and f"{name}_count" not in known} - histograms == set()


@pytest.mark.slow
def test_a_metric_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PROCESSES", dict.fromkeys((metrics.SITE, metrics.TRANSFER), "a process"))
    with pytest.raises(ValueError, match="does not say of which process"):
        metrics.page()


@pytest.mark.parametrize(
    ("page", "heading"), [("docs/compute-domains.md", "## The status"), ("docs/gangs.md", "")]
)
def test_every_reason_that_a_page_explains_is_in_the_reference(page: str, heading: str) -> None:
    text = PAGES[page]
    if heading:
        text = text[text.index(heading) :].partition("\n## ")[0]
    subject = conditions.SUBJECTS[0 if "compute" in page else 1]
    known = {reason.reason for reason in conditions.reasons(subject)}
    types = {reason.type for reason in conditions.reasons(subject)}
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    mentioned = {word for word in known if re.search(rf"\b{word}\b", tables)}
    assert len(mentioned) >= len(known) / 2, known - mentioned
    assert types <= set(re.findall(r"\w+", tables)) | {"Degraded"}


def test_every_account_of_the_manifests_is_in_the_table_of_rights() -> None:
    page = rights.page()
    found = {account.name for folder in INSTALLED for account in accounts(documents(folder))}
    assert len(found) > 5
    assert {name for name in found if f"`{name}`" not in page} == set()
    assert (ROOT / "tests" / "deploy" / "expected_rights.md").read_text() in page


def test_every_kind_of_finding_has_its_page_and_every_page_its_finding() -> None:
    pages, listed = runbooks.pages(), runbooks.page()
    assert set(pages) == {runbook_name(check) for check in Check}
    assert len(pages) == len(Check)
    for check in Check:
        text = pages[runbook_name(check)]
        assert text.startswith(f"# {check}\n")
        for heading in ("What it means", "See for yourself", "Mend it"):
            assert f"## {heading}\n" in text, check
        for link in re.findall(r"\(([a-z-]+)\.md\)", text):
            assert link in pages
        assert f"(runbooks/{runbook_name(check)}.md)" in listed


def test_a_page_has_what_its_check_says_and_the_commands_with_their_effects() -> None:
    reporting = [check for check in Check if runbooks.messages(check)]
    mended = [check for check in Check if runbooks.commands(check)]
    assert len(reporting) > len(Check) / 2
    assert len(mended) > len(Check) / 2
    page = runbooks.pages()["partition-owned"]
    assert (
        "| `rackloom admin partition release --domain DOMAIN --name NAME --reason unknown` | destructive |"
        in page
    )
    assert "the factory partition is still there, and joins" in runbooks.pages()["default-partition-removed"]


def test_the_command_that_prints_a_page_is_a_link_in_the_site(tmp_path) -> None:
    text = (
        "Rights: `python -m docs.site.reference roles`.\n\n```\n`python -m docs.site.reference roles`\n```\n"
    )
    linked = "".join(pages._rewritten(text, "docs/x.md", [], tmp_path))
    assert linked == text.replace(
        "Rights: `python -m docs.site.reference roles`", "Rights: [reference: roles](../reference/roles.md)"
    )
    assert "".join(pages._rewritten("`python -m docs.site.reference rest`", "SECURITY.md", [], tmp_path)) == (
        "[reference: rest](reference/rest.md)"
    )


def test_a_page_is_printed_by_its_name_and_another_name_is_refused(capsys) -> None:
    printing.main(["roles"])
    assert capsys.readouterr().out.startswith("# Roles\n")
    with pytest.raises(SystemExit, match="log-events"):
        printing.main(["tables"])
