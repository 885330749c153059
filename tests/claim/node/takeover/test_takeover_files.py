"""The files of a node: phases, written and refused files, and a death at each write."""

import fcntl
import json
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.claim.node.crash_points import Fuse, Killed, fuse_the_disk
from tests.claim.node.takeover.killed_process import ACTS, ENDED, KILLED, act_until_killed
from tests.claim.node.takeover.nvidia_files import (
    ABORTED,
    STARTED,
    Node,
    checkpoint_file,
    gpu_claim,
    imex_claim,
    kubelet_state,
)

from rackloom.claim.node.plugin import CheckpointEntry, PrepareState, ReadyDevice
from rackloom.claim.node.storage import Checkpoint
from rackloom.claim.node.takeover.claims import Release
from rackloom.claim.node.takeover.node_files import (
    DRIVERS,
    KEPT,
    Fate,
    Phase,
    apply_takeover,
    give_back,
    plan_takeover,
    plan_way_back,
)
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.names import GPU_DRIVER, IMEX_DRIVER
from rackloom.errors import Refused

IMEX, GPU = (IMEX_DRIVER,), (GPU_DRIVER,)
CLAIMS = {
    "u-channel": imex_claim("u-channel", "channel"),
    "u-daemon": imex_claim("u-daemon", "daemon"),
    "u-started": imex_claim("u-started", "channel", state=STARTED),
}
FILE = checkpoint_file(CLAIMS)


def phases(node):
    return [plan_takeover(node.places, driver).phase for driver in DRIVERS]


def entries(node, driver=IMEX_DRIVER):
    return Checkpoint(node.home(driver) / "checkpoint.json", node.boot_id)


def test_a_node_goes_over_and_back_as_it_was(node):
    assert phases(node) == [Phase.NOTHING, Phase.NOTHING]
    assert [plan.writes for plan in apply_takeover(node.places, DRIVERS)] == [(), ()]
    path = node.install(FILE)
    plan = plan_takeover(node.places, IMEX_DRIVER)
    assert (plan.phase, plan.blocked, plan.running) == (Phase.NVIDIA, (), ())
    assert plan.writes == (f"write {path.with_name(KEPT)}", f"write {path}")
    assert [move.fate for move in plan.claims] == [Fate.MOVED] * 3
    assert node.files()["plug/compute-domain.nvidia.com/checkpoint.json"] == FILE, "a plan changes nothing"

    assert [made.phase for made in apply_takeover(node.places, DRIVERS)] == [Phase.NVIDIA, Phase.NOTHING]
    assert path.with_name(KEPT).read_bytes() == FILE
    assert phases(node) == [Phase.TAKEN_OVER, Phase.NOTHING]
    assert {uid: entry.state for uid, entry in entries(node).claims.items()} == {
        "u-channel": PrepareState.COMPLETED,
        "u-daemon": PrepareState.COMPLETED,
        "u-started": PrepareState.STARTED,
    }
    assert [made.writes for made in apply_takeover(node.places, IMEX)] == [()], "again, nothing is to be done"

    way_back = plan_way_back(node.places, IMEX_DRIVER)
    assert way_back.writes == (f"write {path}", f"delete {path.with_name(KEPT)}")
    give_back(node.places, IMEX)
    assert path.read_bytes() == FILE
    assert not path.with_name(KEPT).exists()
    assert [made.writes for made in give_back(node.places, IMEX)] == [()], "again, nothing is to be done"


def test_what_ended_since_is_not_given_back(node, read_by_driver):
    path = node.install(FILE)
    apply_takeover(node.places, IMEX)
    entries(node).drop("u-channel")
    give_back(node.places, IMEX)
    assert path.read_bytes() == checkpoint_file({uid: CLAIMS[uid] for uid in ("u-daemon", "u-started")})
    assert read_by_driver(IMEX_DRIVER, path) == {
        "u-daemon": "PrepareCompleted",
        "u-started": "PrepareStarted",
    }


def prepared(uid, of, /, state=PrepareState.COMPLETED, **record):
    """A claim that our plugin prepared afterwards."""
    driver = GPU_DRIVER if of == "gpu" else IMEX_DRIVER
    device = ReadyDevice(
        requests=("r",),
        pool="node-a",
        device=f"{of}-0",
        cdi_ids=(f"k8s.{driver}/claim={uid}-{of}-0",),
        kind=of,
    )
    return CheckpointEntry(
        ref=ClaimRef(namespace="default", name="later", uid=uid),
        state=state,
        fingerprint="f",
        devices=(device,) if state is PrepareState.COMPLETED else (),
        record=record,
    )


def test_what_was_prepared_since_is_given_back_too(node, read_by_driver):
    path = node.install(checkpoint_file({"u-daemon": CLAIMS["u-daemon"]}))
    apply_takeover(node.places, IMEX)
    checkpoint = entries(node)
    checkpoint.put(prepared("u-new", "channel", kind="channel", domain="cd-<9>"))
    checkpoint.put(prepared("u-begun", "daemon", PrepareState.STARTED, kind="daemon", domain="cd-8"))
    checkpoint.put(
        msgspec.structs.replace(prepared("u-gone", "channel"), state=PrepareState.ABORTED, devices=())
    )
    give_back(node.places, IMEX)
    assert read_by_driver(IMEX_DRIVER, path) == {
        "u-daemon": "PrepareCompleted",
        "u-new": "PrepareCompleted",
        "u-begun": "PrepareStarted",
    }
    made = json.loads(path.read_bytes())["v2"]["preparedClaims"]
    assert (made["u-new"]["name"], made["u-new"]["namespace"]) == ("later", "default")
    for uid, kind, domain in (("u-new", "Channel", "cd-<9>"), ("u-begun", "Daemon", "cd-8")):
        devices = made[uid]["status"]["allocation"]["devices"]
        config = devices["config"][0]["opaque"]["parameters"]
        assert (config["kind"], config["domainID"]) == (f"ComputeDomain{kind}Config", domain)
        assert [result["device"] for result in devices["results"]] == [f"{kind.lower()}-0"]
    # And over again: the driver's file is enough.
    apply_takeover(node.places, IMEX)
    assert entries(node).claims["u-new"].devices == prepared("u-new", "channel").devices


@pytest.mark.parametrize(("state", "release"), [({}, ""), ({"mpsControlDaemonID": ""}, "-0.4")])
def test_gpus_that_were_prepared_since_are_given_back_too(node, read_by_driver, state, release):
    node.set_state("u-old")
    path = node.install(checkpoint_file({"u-old": gpu_claim("u-old", "gpu-1", state=state)}), GPU_DRIVER)
    apply_takeover(node.places, GPU)
    no_sharing = {"time_slices": {}, "exclusive": [], "daemons": []}
    entries(node, GPU_DRIVER).put(prepared("u", "gpu", sharing=no_sharing, uuids={"gpu-0": "GPU-x"}))
    give_back(node.places, GPU)
    states = dict.fromkeys(("u", "u-old"), "PrepareCompleted")
    assert read_by_driver(GPU_DRIVER, path, release) == states
    group = json.loads(path.read_bytes())["v2"]["preparedClaims"]["u"]["preparedDevices"][0]
    assert group["configState"] == state, "as the release writes it"
    assert group["devices"][0]["gpu"]["info"] == {"uuid": "GPU-x"}


@pytest.mark.parametrize("release", Release)
def test_a_release_that_the_file_does_not_show_may_be_named(node, read_by_driver, release):
    path = node.install(checkpoint_file({}), GPU_DRIVER)
    apply_takeover(node.places, GPU)
    entries(node, GPU_DRIVER).put(prepared("u", "gpu", sharing={}, uuids={"gpu-0": "GPU-x"}))
    (move,) = plan_way_back(node.places, GPU_DRIVER).blocked
    assert move.fix == "name the release by --release"
    assert plan_way_back(node.places, GPU_DRIVER, release).blocked == ()
    give_back(node.places, GPU, release)
    structs = "-0.4" if release is Release.V0_4 else ""
    assert read_by_driver(GPU_DRIVER, path, structs) == {"u": "PrepareCompleted"}
    with pytest.raises(AssertionError, match="checkpoint is corrupted"):
        read_by_driver(GPU_DRIVER, path, "" if structs else "-0.4")


def test_a_file_of_two_releases_is_not_written(node):
    node.set_state("o")
    node.install(checkpoint_file({"o": gpu_claim("o", "gpu-1")}), GPU_DRIVER)
    apply_takeover(node.places, GPU)
    entries(node, GPU_DRIVER).put(prepared("u", "gpu", sharing={}, uuids={"gpu-0": "GPU-x"}))
    (move,) = plan_way_back(node.places, GPU_DRIVER, Release.V0_4).blocked
    assert move.why == "the file that was found is of release 0.5, and one release cannot read both"
    assert plan_way_back(node.places, GPU_DRIVER, Release.V0_5).blocked == ()


@pytest.mark.parametrize(
    ("driver", "found", "later", "why"),
    [
        (
            IMEX_DRIVER,
            {},
            prepared("u", "isolated-channel", kind="isolated-channel", domain="d"),
            "has no device of kind isolated-channel",
        ),
        (
            GPU_DRIVER,
            {},
            prepared("u", "gpu", sharing={"time_slices": {"GPU-x": 2}}),
            "would not undo the sharing",
        ),
        (
            GPU_DRIVER,
            {},
            prepared("u", "gpu", sharing={}, uuids={"gpu-0": "GPU-x"}),
            "does not show which release",
        ),
        (
            GPU_DRIVER,
            {"o": gpu_claim("o", "gpu-1")},
            prepared("u", "gpu"),
            "needs more of gpu-0 than is recorded",
        ),
    ],
)
def test_what_the_driver_could_not_undo_blocks_the_way_back(node, driver, found, later, why):
    node.set_state("o")
    node.install(checkpoint_file(found), driver)
    apply_takeover(node.places, [driver])
    entries(node, driver).put(later)
    before = node.files()
    (move,) = plan_way_back(node.places, driver).blocked
    assert why in move.why
    with pytest.raises(
        Refused, match=rf"claim default/later of {driver} cannot be moved: .*{why}"
    ) as refused:
        give_back(node.places, [driver])
    assert refused.value.nearest_fix.endswith("; nothing was changed")
    assert node.files() == before


def test_an_early_release_gets_back_what_it_wrote_and_nothing_else(node):
    found = checkpoint_file({"u-channel": CLAIMS["u-channel"]}, boot_id="", parts="v1")
    node.set_state("u-channel")
    path = node.install(found)
    apply_takeover(node.places, IMEX)
    assert entries(node).claims["u-channel"].state is PrepareState.COMPLETED
    entries(node).put(prepared("u-new", "daemon", kind="daemon", domain="d"))
    with pytest.raises(Refused, match="in a form that this early release of NVIDIA's driver may not read"):
        give_back(node.places, IMEX)
    entries(node).drop("u-new")
    give_back(node.places, IMEX)
    assert path.read_bytes() == found


def test_one_blocked_claim_keeps_all_as_it_is(node):
    node.set_state("g")
    node.install(FILE)
    bound = gpu_claim("g", "gpu-vfio-0", kind="vfio")
    node.install(checkpoint_file({"g": bound}), GPU_DRIVER)
    before = node.files()
    with pytest.raises(
        Refused, match=r"claim default/claim-g of gpu\.nvidia\.com cannot be moved: NVIDIA's driver may have"
    ):
        apply_takeover(node.places, DRIVERS)
    assert node.files() == before
    assert [len(plan_takeover(node.places, driver).blocked) for driver in DRIVERS] == [0, 1]
    apply_takeover(node.places, IMEX)
    assert phases(node) == [Phase.TAKEN_OVER, Phase.NVIDIA]


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (FILE[:-20], "of NVIDIA's driver cannot be read: Input data was truncated"),
        (
            FILE.replace(b"channel-0", b"channel-1"),
            "of NVIDIA's driver cannot be read: its part v1 has checksum",
        ),
        (b"{", "cannot be read: it is no checkpoint"),
        (b"", "cannot be read: it is no checkpoint"),
    ],
)
def test_damage_is_named_and_left_as_it_is(node, found, what):
    path = node.install(found)
    for act in (apply_takeover, give_back):
        if act is apply_takeover or not found.startswith(b'{"checksum"'):
            with pytest.raises(Refused, match=f"checkpoint {path} {what}"):
                act(node.places, IMEX)
    with pytest.raises(Refused, match=f"checkpoint {path} {what}"):
        plan_takeover(node.places, IMEX_DRIVER)
    assert node.files()[f"plug/{IMEX_DRIVER}/checkpoint.json"] == found
    assert not path.with_name(KEPT).exists()


def test_a_kept_file_that_was_damaged_blocks_the_way_back(node):
    path = node.install(FILE)
    apply_takeover(node.places, IMEX)
    kept = path.with_name(KEPT)
    kept.write_bytes(FILE.replace(b"cd-1", b"cd-2"))
    before = node.files()
    with pytest.raises(
        Refused, match=f"checkpoint {kept} of NVIDIA's driver cannot be read: its part v1 has checksum"
    ):
        give_back(node.places, IMEX)
    assert node.files() == before


def test_what_was_never_taken_over_does_not_go_back(node):
    path = node.home() / "checkpoint.json"
    path.parent.mkdir(parents=True)
    entries(node).put(prepared("u", "channel", kind="channel", domain="d"))
    with pytest.raises(Refused, match="was never taken over: there is nothing to go back to"):
        give_back(node.places, IMEX)
    assert phases(node) == [Phase.OURS, Phase.NOTHING]


def test_claims_of_an_earlier_boot_count_as_started(node):
    node.install(FILE)
    node.boot_id = "boot-2"
    (note,) = plan_takeover(node.places, IMEX_DRIVER).notes
    assert "earlier boot" in note
    apply_takeover(node.places, IMEX)
    assert {entry.state for entry in entries(node).claims.values()} == {PrepareState.STARTED}


def test_a_reboot_since_is_seen_by_the_driver_too(node, read_by_driver):
    path = node.install(FILE)
    apply_takeover(node.places, IMEX)
    node.boot_id = "boot-2"
    (note,) = plan_way_back(node.places, IMEX_DRIVER).notes
    assert "will forget all claims" in note
    give_back(node.places, IMEX)
    assert set(read_by_driver(IMEX_DRIVER, path).values()) == {"PrepareStarted"}
    assert json.loads(path.read_bytes())["v2"]["nodeBootID"] == "boot-1"


def test_a_claim_without_its_cdi_file_is_named(node):
    node.install(FILE)
    node.add_cdi(IMEX_DRIVER, "u-daemon")
    (note,) = plan_takeover(node.places, IMEX_DRIVER).notes
    assert note.startswith("claim u-channel has no CDI file")


def test_a_damaged_state_of_kubelet_is_not_believed(node):
    node.install(checkpoint_file({"u": gpu_claim("u", "gpu-0")}), GPU_DRIVER)
    node.set_state("u")
    assert plan_takeover(node.places, GPU_DRIVER).blocked == ()
    (node.root / "dra_manager_state").write_bytes(kubelet_state("u", changed=" "))
    assert [move.fix for move in plan_takeover(node.places, GPU_DRIVER).blocked] == [
        "name the file by --kubelet-state"
    ]


# Plugins that run.


@pytest.mark.parametrize(
    "where", ["plug/compute-domain.nvidia.com/dra.sock", "reg/compute-domain.nvidia.com-reg.sock"]
)
def test_nothing_is_done_while_a_plugin_answers(node, where):
    path = node.install(FILE)
    node.places.registry.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(node.root / where))
        server.listen()
        assert plan_takeover(node.places, IMEX_DRIVER).running == (f"it answers on {node.root / where}",)
        with pytest.raises(
            Refused, match=r"a plugin of compute-domain\.nvidia\.com runs on this node: it answers on"
        ):
            apply_takeover(node.places, IMEX)
    assert path.read_bytes() == FILE
    apply_takeover(node.places, IMEX)
    assert phases(node)[0] is Phase.TAKEN_OVER, "a socket that a dead process left does not matter"


@pytest.mark.parametrize("lock", ["plugin.lock", "pu.lock"])
def test_nothing_is_done_while_a_plugin_holds_a_lock(node, lock):
    path = node.install(FILE)
    with (path.parent / lock).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert plan_takeover(node.places, IMEX_DRIVER).running == (f"a plugin holds {path.parent / lock}",)
        with pytest.raises(Refused, match=f"it holds {path.parent / lock}"):
            apply_takeover(node.places, IMEX)
    assert path.read_bytes() == FILE


# Deaths.


def one_death(node, act, death):
    """Whether `act` died at point number `death` of its writes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fuse = Fuse(death)
        fuse_the_disk(fuse, monkeypatch)
        try:
            act()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("direction", ["forward", "back"])
@pytest.mark.parametrize("act", ["apply", "back"])
def test_a_death_at_any_write_loses_nothing(node, act, direction):
    both = {
        IMEX_DRIVER: FILE,
        GPU_DRIVER: checkpoint_file({"g": gpu_claim("g", "gpu-0")}),
    }
    node.set_state("g")
    work = {"apply": apply_takeover, "back": give_back}
    for death in range(1, 100):
        for driver, found in both.items():
            node.install(found, driver).with_name(KEPT).unlink(missing_ok=True)
        if act == "back":
            apply_takeover(node.places, DRIVERS)
        died = one_death(node, lambda: work[act](node.places, DRIVERS), death)
        if direction == "forward":
            apply_takeover(node.places, DRIVERS)
            assert phases(node) == [Phase.TAKEN_OVER] * 2
            assert set(entries(node).claims) == set(CLAIMS)
            assert set(entries(node, GPU_DRIVER).claims) == {"g"}
            assert {driver: (node.home(driver) / KEPT).read_bytes() for driver in both} == both
        else:
            give_back(node.places, DRIVERS)
            assert {driver: (node.home(driver) / "checkpoint.json").read_bytes() for driver in both} == both
            assert not [name for name in node.files() if name.endswith((KEPT, ".partial"))]
        if not died:
            break
    assert death > 8, "both writes of both drivers, before and after each sync"


def test_aborted_claims_are_taken_over_and_forgotten_on_the_way_back(node):
    path = node.install(
        checkpoint_file({"u": imex_claim("u", "channel", state=ABORTED, abortedAt="2026-01-02T03:04:05Z")})
    )
    apply_takeover(node.places, IMEX)
    assert entries(node).claims["u"].state is PrepareState.ABORTED
    give_back(node.places, IMEX)
    assert path.read_bytes() == checkpoint_file({})


# Deaths of a real process: SIGKILL, any number of times, in either direction.

HELD = {uid: imex_claim(uid, kind) for uid, kind in (("u-1", "channel"), ("u-2", "daemon"))}
HELD["u-3"] = imex_claim("u-3", "channel", state=STARTED)
GPUS = {f"g-{number}": gpu_claim(f"g-{number}", f"gpu-{number}") for number in range(3)}
claim_sets = st.tuples(st.sets(st.sampled_from(sorted(HELD))), st.sets(st.sampled_from(sorted(GPUS))))
lives = st.lists(st.tuples(st.sampled_from(sorted(ACTS)), st.integers(1, 60)), min_size=1, max_size=6)


@pytest.mark.slow
@settings(deadline=None)
@given(claims=claim_sets, lives=lives)
def test_processes_that_are_killed_lose_nothing(claims, lives):
    held, gpus = claims
    found = {
        IMEX_DRIVER: checkpoint_file({uid: HELD[uid] for uid in held}),
        GPU_DRIVER: checkpoint_file({uid: GPUS[uid] for uid in gpus}),
    }
    with tempfile.TemporaryDirectory(prefix="rl") as root:
        node = Node(Path(root))
        node.set_state(*gpus)
        for driver, content in found.items():
            node.install(content, driver)
        for act, death in lives:
            assert act_until_killed(act, node.places, death) in (KILLED, ENDED)
            for driver, content in found.items():
                now = (node.home(driver) / "checkpoint.json").read_bytes()
                assert now == content or set(entries(node, driver).claims) == set(
                    held if driver == IMEX_DRIVER else gpus
                ), "the file is that of one driver, with all claims"
        apply_takeover(node.places, DRIVERS)
        assert set(entries(node).claims) == set(held)
        assert set(entries(node, GPU_DRIVER).claims) == set(gpus)
        give_back(node.places, DRIVERS)
        assert {driver: (node.home(driver) / "checkpoint.json").read_bytes() for driver in found} == found
        assert not [name for name in node.files() if name.endswith((KEPT, ".partial"))]


@pytest.mark.slow
def test_the_kills_reach_every_write(node):
    """Without a death the property above would say nothing."""
    points = []
    for death in range(1, 100):
        node.install(FILE).with_name(KEPT).unlink(missing_ok=True)
        ended = act_until_killed("apply", node.places, death)
        points.append((node.home() / "checkpoint.json").read_bytes() == FILE)
        if ended == ENDED:
            break
    assert death > 8
    assert points.count(True) > 5, "before the last write"
    assert points.count(False) > 1, "after it"
