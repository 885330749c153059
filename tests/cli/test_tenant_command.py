"""The tenant's commands on a site of one simulated rack. Watching and waiting use a fake client."""

import json
import re
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import yaml
from msgspec import structs
from tests.client.conftest import site

from rackloom.cli.main import app
from rackloom.cli.tenant import INSTANCE
from rackloom.cli.tenant_objects import ObjectKind, age, wait, wait_until_gone, watch
from rackloom.client.errors import Missing, NotDecided
from rackloom.errors import Refused, Retry

__all__ = ["site"]


@pytest.fixture
def run(site, capsys, monkeypatch):
    """Runs a command as an organisation and returns its standard output and standard error."""
    monkeypatch.setenv("RACKLOOM_HOME", str(site.home))
    monkeypatch.setenv("RACKLOOM_ORG", "cli")

    def command(*words):
        app(words, exit_on_error=False, print_error=False)
        printed = capsys.readouterr()
        return printed.out, printed.err

    return command


@pytest.fixture
def vpc(run):
    """A VPC with its own partition. Deletes the instances that the test makes in it."""
    run("partition", "create", "train")
    run("vpc", "create", "net", "--partition", "train")
    yield "net"
    for name in run("instance", "list", "-o", "name")[0].split():
        run("instance", "delete", name, "--wait")
    run("vpc", "delete", "net", "--wait")
    run("partition", "delete", "train", "--wait")


def test_machines_are_taken_shown_and_given_back(run, vpc):
    plan, _ = run("instance", "create", "job", "--vpc", vpc, "--count", "2", "--dry-run")
    assert "NVLINK DOMAIN" in plan
    assert run("instance", "list") == ("", "organisation cli has no instances\n")
    made, progress = run("instance", "create", "job", "--vpc", vpc, "--count", "2", "--wait")
    assert progress.endswith("2 of 2 Ready\n")
    names = [line.split()[0] for line in made.splitlines()[1:]]
    assert sorted(run("instance", "list", "-o", "name")[0].split()) == sorted(names)
    assert len(names) == 2
    row = run("partition", "get", "train")[0].splitlines()[1].split()
    assert row[:3] == ["train", "Ready", "8"]
    first = json.loads(run("instance", "get", names[0], "-o", "json")[0])
    assert yaml.safe_load(run("instance", "get", first["id"], "-o", "yaml")[0])["name"] == names[0]
    assert len(json.loads(run("instance", "list", "-o", "json")[0])) == 2
    assert first["machineId"] in run("machine", "list", "-o", "name")[0].split()
    _, gone = run("instance", "delete", *names, "--wait")
    assert gone.endswith("2 of 2 deleted\n")


def test_each_command_names_the_next_for_the_same_site(run, site):
    try:
        made, following = run("partition", "create", "two words", "--home", str(site.home))
        number = re.search(r"partition two words created \((.*)\)", made)[1]
        assert following == (
            f"next: rackloom vpc create NAME --partition {number} --org cli --home {site.home}\n"
        )
        assert run(*following.split()[2:])[0].startswith("vpc NAME created")
    finally:
        run("vpc", "delete", "NAME", "--wait")
        run("partition", "delete", "two words", "--wait")


def test_a_command_says_what_it_asks_of_the_site_and_shows_no_token(run, site):
    made, asked = run("partition", "list", "-v")
    pattern = rf"GET {site.url}/v2/org/cli/nico/nvlink-logical-partition: 200 in \d+ ms\n"
    assert made == ""
    assert re.fullmatch(f"(?:{pattern})+organisation cli has no partitions\n", asked)


def test_a_quiet_command_prints_results_alone(run):
    try:
        made, following = run("partition", "create", "quiet", "-q")
        assert made.startswith("partition quiet created (")
        assert following == ""
        assert run("partition", "delete", "quiet", "--wait", "--quiet")[1] == ""
        # That there is none is the result: a misspelt organisation looks like an empty one.
        nothing = "organisation clii has no partitions\n"
        assert run("partition", "list", "-q", "--org", "clii") == ("", nothing)
    finally:
        for name in run("partition", "list", "-o", "name")[0].split():
            run("partition", "delete", name, "--wait")


def test_what_is_made_and_deleted_is_data_too(run):
    made = json.loads(run("partition", "create", "data", "--json")[0])
    assert made["name"] == "data"
    deleted = yaml.safe_load(run("partition", "delete", "data", "--wait", "-o", "yaml")[0])
    assert deleted == [{"id": made["id"], "name": "data"}]


def test_one_machine_is_no_batch(run, vpc):
    assert "solo" in run("instance", "create", "solo", "--vpc", vpc, "--dry-run")[0]
    assert run("instance", "create", "solo", "--vpc", vpc)[0].splitlines()[1].startswith("solo ")


def refusal(run, *words):
    with pytest.raises(Refused) as refused:
        run(*words)
    return refused.value


def test_a_name_that_is_not_there_is_refused_with_the_nearest(run, vpc):
    near = refusal(run, "vpc", "get", "nett")
    assert (near.reason, near.nearest_fix) == ("there is no vpc 'nett'", "did you mean net?")
    far = refusal(run, "vpc", "get", "something")
    assert far.nearest_fix == "see: rackloom vpc list"
    assert isinstance(refusal(run, "vpc", "get", "00000000-0000-4000-8000-000000000000"), Missing)


def test_a_misspelt_name_among_others_deletes_nothing(run, vpc):
    refusal(run, "vpc", "delete", vpc, "nett")
    assert run("vpc", "list", "-o", "name")[0] == "net\n"


def test_a_name_of_two_is_refused_with_their_ids():
    kind = kind_of(named := [thing("a", "1"), thing("a", "2")])
    with pytest.raises(Refused, match="2 things are called 'a'") as refused:
        kind.find(FakeClient([named]), "a")
    assert refused.value.nearest_fix == "give an id: 1, 2"


def test_an_organisation_without_objects_is_named(run):
    assert run("partition", "list", "--org", "misspelt") == ("", "organisation misspelt has no partitions\n")
    assert run("partition", "list", "--org", "misspelt", "-o", "json")[0] == "[]\n"


def test_types_and_allocations_are_listed(run):
    assert run("type", "list", "-o", "name")[0] == "gb200-nvl72\n"
    assert re.search(r"\d+ gb200-nvl72", run("allocation", "list")[0])


def test_a_site_elsewhere_needs_a_token(run):
    refused = refusal(run, "vpc", "list", "--url", "https://site.example")
    assert "--token-file" in refused.nearest_fix


# Watching and waiting.


def thing(name, object_id, status="Ready", **more):
    return SimpleNamespace(id=object_id, name=name, status=status, **more)


def kind_of(_):
    return ObjectKind(
        noun="thing",
        plural="things",
        headers=("NAME", "STATUS"),
        listed=lambda: "list",
        read=lambda object_id: object_id,
        name=lambda found: found.name,
        row=lambda found, _: (found.name, found.status),
    )


class FakeClient:
    """Returns one reading after the other, and then the last one forever. Raises errors among them."""

    def __init__(self, readings):
        self._readings = list(readings)

    def items(self, _):
        reading = self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]
        if isinstance(reading, Exception):
            raise reading
        return iter(reading)

    def call(self, object_id):
        found = [each for each in self.items("list") if each.id == object_id]
        if not found:
            raise Missing("not found", status=404, data={})
        return found[0]


class EndedError(Exception):
    pass


def rounds(number):
    """A sleep that ends the test after some rounds."""
    left = [None] * number

    def sleep(_):
        if not left:
            raise EndedError
        left.pop()

    return sleep


def test_watching_prints_what_is_new_changed_or_gone(capsys):
    readings = [
        [thing("a", "1", "Pending")],
        [thing("a", "1", "Pending"), thing("b", "2")],
        NotDecided("the service is busy", after=1.0),
        [thing("a", "1"), thing("b", "2")],
        [thing("b", "2")],
    ]
    with pytest.raises(EndedError):
        watch(FakeClient(readings), kind_of(None), rounds(5))
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1:] == ["a  Pending  1", "b  Ready  2", "a  Ready  1", "a  deleted  1"]
    assert "asking again" in printed.err


def test_watching_goes_on_where_a_name_in_the_table_cannot_be_read(capsys):
    failures = [NotDecided("the service is busy", after=1.0)]

    def row(found, _):
        if failures:
            raise failures.pop()
        return found.name, found.status

    with pytest.raises(EndedError):
        watch(FakeClient([[thing("a", "1")]]), structs.replace(kind_of(None), row=row), rounds(1))
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1:] == ["a  Ready  1"]
    assert "asking again" in printed.err


def test_waiting_ends_when_all_are_ready_and_known(capsys):
    unknown = thing("a", "1", unknown_since=datetime(2026, 1, 1, tzinfo=UTC))
    readings = [[thing("a", "1", "Pending")], [unknown], [thing("a", "1", unknown_since=None)]]
    assert wait(FakeClient(readings), kind_of(None), ["1"], "Ready", 60.0, rounds(2))
    assert capsys.readouterr().err == "0 of 1 Ready\n1 of 1 Ready\n"


def test_waiting_ends_with_an_error():
    with pytest.raises(Refused, match="a: Error"):
        wait(FakeClient([[thing("a", "1", "Error")]]), kind_of(None), ["1"], "Ready", 60.0, rounds(0))
    pending = FakeClient([[thing("a", "1", "Pending")]])
    moments = iter(range(100))
    with pytest.raises(Retry, match="0 of 1 are Ready after 3 s"):
        wait(pending, kind_of(None), ["1"], "Ready", 3.0, rounds(9), lambda: next(moments))
    moments = iter(range(100))
    with pytest.raises(Retry, match="0 of 1 are deleted after 3 s"):
        wait_until_gone(pending, kind_of(None), ["1"], 3.0, rounds(9), lambda: next(moments))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (180_000, "2d")]
)
def test_the_age_is_in_the_largest_unit(seconds, text):
    now = datetime.now(UTC).timestamp()
    assert age(datetime.fromtimestamp(now - seconds - 0.1, UTC)) == text


def test_a_status_that_is_not_confirmed_is_unknown_since_a_time():
    found = thing(
        "a", "1", unknown_since=datetime(2026, 1, 1, 8, 30, tzinfo=UTC), vpc_id=None, machine_id=None
    )
    found.nv_link_interfaces, found.created = [], datetime.now(UTC)
    names = SimpleNamespace(of=lambda *_: "-")
    assert INSTANCE.row(found, names)[1] == "unknown since 08:30:00 UTC"
