"""The checkpoint: written entries are read again, and a damaged file is never taken for an empty one."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.node.plugin import CheckpointEntry, PrepareState, ReadyDevice
from rackloom.claim.node.storage import (
    BootScopedFiles,
    Checkpoint,
    CheckpointContent,
    decode_checkpoint,
    encode_checkpoint,
)
from rackloom.core.cluster.claims import ClaimRef
from rackloom.errors import Refused
from rackloom.runtime.durable_files import PARTIAL

HERE = Path("checkpoint.json")
words = st.text(max_size=12)
devices = st.builds(
    ReadyDevice,
    requests=st.tuples(words),
    pool=words,
    device=words,
    cdi_ids=st.lists(words, max_size=2).map(tuple),
    share_id=st.none() | words,
    admin_access=st.booleans(),
    kind=words,
)
entries = st.builds(
    CheckpointEntry,
    ref=st.builds(ClaimRef, namespace=words, name=words, uid=words),
    state=st.sampled_from(PrepareState),
    fingerprint=words,
    devices=st.lists(devices, max_size=2).map(tuple),
    record=st.dictionaries(words, words | st.integers(-10, 10), max_size=2),
    undoing=st.booleans(),
    aborted_at=st.none() | st.floats(0, 2e9),
)
contents = st.builds(CheckpointContent, boot_id=words, claims=st.dictionaries(words, entries, max_size=3))


def entry(uid: str = "u1", state: PrepareState = PrepareState.COMPLETED) -> CheckpointEntry:
    return CheckpointEntry(ref=ClaimRef(namespace="n", name="c", uid=uid), state=state, fingerprint="f")


DEVICE = ReadyDevice(
    requests=("r",), pool="p", device="d", cdi_ids=("x",), share_id=None, admin_access=False, kind="k"
)


@given(contents)
def test_what_was_written_is_read(content):
    assert decode_checkpoint(encode_checkpoint(content), HERE) == content


@given(contents, st.data())
def test_no_damage_goes_unnoticed(content, data):
    written = encode_checkpoint(content)
    # Spaces around JSON carry nothing, and neither does the newline at the end.
    at = data.draw(st.integers(0, len(written) - 2))
    flip = data.draw(st.integers(1, 255))
    damaged = bytes([*written[:at], written[at] ^ flip, *written[at + 1 :]])
    with suppress(Refused):
        assert decode_checkpoint(damaged, HERE) == content


@given(contents, st.integers(0, 200))
def test_a_file_that_ends_early_is_refused(content, cut):
    written = encode_checkpoint(content)
    with pytest.raises(Refused, match=f"checkpoint {HERE} cannot be read"):
        decode_checkpoint(written[: min(cut, len(written) - 2)], HERE)


def test_what_is_wrong_is_named():
    other = {"format": "cpu_manager_state", "version": 1, "checksum": "", "content": {}}
    with pytest.raises(Refused, match=f"checkpoint {HERE} cannot be read: its format is 'cpu_manager_state'"):
        decode_checkpoint(json.dumps(other).encode(), HERE)
    changed = json.loads(encode_checkpoint(CheckpointContent(boot_id="b")))
    changed["content"]["boot_id"] = "another"
    sums = "its content has SHA-256 [0-9a-f]{64}, but [0-9a-f]{64} was written"
    with pytest.raises(Refused, match=f"checkpoint {HERE} cannot be read: {sums}"):
        decode_checkpoint(json.dumps(changed).encode(), HERE)
    with pytest.raises(Refused, match="has version 2; this plugin reads up to 1") as refused:
        decode_checkpoint(json.dumps({**changed, "version": 2}).encode(), HERE)
    assert refused.value.nearest_fix == "run the newer version of the plugin that wrote it"


def file_with(content: object) -> bytes:
    """As a newer plugin writes it, with the right checksum."""
    raw = json.dumps(content).encode()
    return b'{"format":"rackloom-checkpoint","version":1,"since":"2.0","checksum":"%s","content":%s}' % (
        hashlib.sha256(raw).hexdigest().encode(),
        raw,
    )


def test_fields_of_a_newer_plugin_are_ignored():
    content = {"boot_id": "b", "claims": {}, "seed": 7}
    assert decode_checkpoint(file_with(content), HERE) == CheckpointContent(boot_id="b")


def test_content_of_another_shape_is_refused_although_its_checksum_is_right():
    with pytest.raises(Refused, match=f"checkpoint {HERE} cannot be read: Expected `str`, got `int`"):
        decode_checkpoint(file_with({"boot_id": 1}), HERE)


def test_changes_are_on_the_disk_at_once(tmp_path):
    path = tmp_path / "checkpoint.json"
    checkpoint = Checkpoint(path, "boot")
    checkpoint.put(entry("u1"))
    checkpoint.put(entry("u2"))
    checkpoint.drop("u1")
    checkpoint.drop("unheard-of")
    assert Checkpoint(path, "boot").claims == checkpoint.claims == {"u2": entry("u2")}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.json"]


def test_after_a_boot_nothing_is_prepared_but_everything_is_remembered(tmp_path):
    path = tmp_path / "checkpoint.json"
    before = Checkpoint(path, "boot-1")
    label = {"kind": "channel", "domain": "d"}
    before.put(msgspec.structs.replace(entry("u1"), record=label))
    before.put(
        msgspec.structs.replace(
            entry("u2", PrepareState.ABORTED), devices=(DEVICE,), undoing=True, aborted_at=5.0
        )
    )
    after = Checkpoint(path, "boot-2").claims
    assert after == {
        "u1": msgspec.structs.replace(entry("u1", PrepareState.STARTED), record=label),
        "u2": entry("u2", PrepareState.STARTED),
    }


def test_a_damaged_checkpoint_is_not_overwritten_and_what_to_do_is_named(tmp_path):
    path = tmp_path / "checkpoint.json"
    path.write_text("{")
    with pytest.raises(Refused, match=f"checkpoint {path} cannot be read: it is no checkpoint") as refused:
        Checkpoint(path, "boot")
    assert refused.value.nearest_fix == (
        f"drain the node, move {path} away and start the plugin again; "
        "without it the plugin cannot tell which claims it has prepared"
    )
    assert path.read_text() == "{"


# Values that mean nothing after a reboot: one file each, gone with the boot.


class Note(msgspec.Struct, frozen=True):
    claim: str
    device: str
    boot_id: str = "boot-1"
    text: str = ""

    @property
    def key(self) -> str:
        return f"{self.claim}-{self.device}"


class Notes(BootScopedFiles[Note]):
    shape = Note


FIRST, SECOND, OTHER = Note("c1", "eth0"), Note("c1", "eth1"), Note("c2", "eth0")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "below" / "notes"


def test_values_are_found_by_claim_and_device_and_after_a_restart(root):
    notes = Notes(root, "boot-1")
    for note in (SECOND, FIRST, OTHER):
        notes.put(note)
    again = Notes(root, "boot-1")
    for known in (notes, again):
        assert known.get("c1", "eth1") == SECOND
        assert known.get("c2", "eth1") is None
        assert set(known.of_claim("c1")) == {FIRST, SECOND}
        assert set(known.all()) == {FIRST, SECOND, OTHER}
    assert again.all() == (FIRST, SECOND, OTHER), "in the order of their files"
    assert root.stat().st_mode & 0o777 == 0o750


def test_a_value_is_replaced_and_deleted_on_the_disk_too(root):
    notes = Notes(root, "boot-1")
    notes.put(FIRST)
    changed = msgspec.structs.replace(FIRST, text="later")
    notes.put(changed)
    assert json.loads((root / "c1-eth0.json").read_text())["text"] == "later"
    assert notes.all() == Notes(root, "boot-1").all() == (changed,)
    notes.drop(changed)
    assert notes.all() == Notes(root, "boot-1").all() == ()
    notes.drop(changed)
    assert list(root.iterdir()) == []


def test_another_boot_deletes_what_was_left(root):
    Notes(root, "boot-1").put(FIRST)
    (root / f".c1-eth1.json{PARTIAL}").write_text("{")
    (root / "README").write_text("not ours")
    notes = Notes(root, "boot-2")
    assert (notes.boot_id, notes.all()) == ("boot-2", ())
    assert [file.name for file in root.iterdir()] == ["README"]


def test_a_file_that_was_being_written_is_deleted_in_the_same_boot_too(root):
    Notes(root, "boot-1").put(FIRST)
    (root / f".c1-eth1.json{PARTIAL}").write_text("{")
    assert Notes(root, "boot-1").all() == (FIRST,)
    assert [file.name for file in root.iterdir()] == ["c1-eth0.json"]
