"""The meaning of each XID in NVIDIA's catalogue, and its consequence for a GPU.

The tables here are a second transcription of the catalogue, in another form than the package's files.
"""

import itertools

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.claim.node.gpu.kernel_records import USER, kernel_record, kernel_xid

from rackloom.claim.node.gpu.inventory import GpuInventory, NodeGpu, RecoveryAction, XidError
from rackloom.claim.node.gpu.monitor import (
    InventorySnapshot,
    gpu_health,
    gpu_taints,
    record_errors,
    update_conditions,
)
from rackloom.claim.node.gpu.xids import (
    LINE_SECONDS,
    REVISION,
    XidRules,
    XidsSeen,
    judge_xids,
    parse_kernel_record,
    xid_catalogue,
)
from rackloom.claim.node.plugin import Health

# The catalogue, row by row.

KEEP_OFF = {
    "RESET_GPU": {46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158},
    "RESTART_BM": {79},
    "RESTART_VM": {151},
    "WORKFLOW_XID_48": {48},
    "CHECK_MECHANICALS": {54},
    "CHECK_UVM": {159},
    "": {*range(166, 173)},
}
NO_FAULT_OF_THE_GPU = {
    "IGNORE": {14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161}
    | {*range(162, 166)},
    "RESTART_APP": {8, 11, 13, 25, 31, 32, 39, 40, 41, 60, *range(68, 73), 75, 76, 77, 80, *range(82, 87)}
    | {88, 89, 94, *range(96, 106), *range(126, 136), 139},
    "WORKFLOW_XID_45": {45},
    "UPDATE_SWFW": {78},
    "XID_154": {154},
}
NEED_A_LINE = {"WORKFLOW_NVLINK_ERR": {74}, "WORKFLOW_NVLINK5_ERR": {*range(144, 151)}}
ANNOUNCED_BY_154 = {
    48,
    62,
    63,
    64,
    74,
    79,
    94,
    95,
    109,
    110,
    120,
    136,
    *range(143, 151),
    155,
    156,
    158,
    159,
    160,
    161,
}


def expected_action(number):
    for actions in (KEEP_OFF, NO_FAULT_OF_THE_GPU, NEED_A_LINE):
        for action, numbers in actions.items():
            if number in numbers:
                return action
    # Numbers that these GPUs do not use, and 142.
    return "CONTACT_SUPPORT"


def verdict_of_event(number, **rules):
    (verdict,) = judge_xids(XidsSeen(events={number: 0.0}), XidRules(now=0.0, **rules))
    return verdict


def test_the_catalogue_has_every_number_and_its_revision():
    assert sorted(xid_catalogue()) == list(range(1, 173))
    assert "1 to 172" in REVISION


def test_each_row_of_the_catalogue():
    for number, row in xid_catalogue().items():
        action = expected_action(number)
        found = (number, row.action, bool(row.linked), bool(row.meaning))
        assert found == (number, action, number in ANNOUNCED_BY_154, True)
        verdict = verdict_of_event(number, log_trouble="no permission")
        needs_line = action in NEED_A_LINE
        label = f"{number}-no-kernel-log" if needs_line else str(number)
        keeps_off = action in KEEP_OFF or action == "CONTACT_SUPPORT"
        assert (verdict.label, verdict.keeps_off, verdict.is_known) == (label, keeps_off, not needs_line)
        assert ("no permission" in verdict.reason) is needs_line


def test_the_errors_that_are_often_taken_for_others():
    rows = xid_catalogue()
    assert verdict_of_event(109).keeps_off  # A context switch that timed out needs a reset.
    assert (rows[119].action, rows[119].linked) == ("RESET_GPU", "")
    assert (rows[120].action, rows[120].linked) == ("RESET_GPU", "R565")


@pytest.mark.parametrize(
    ("number", "driver", "announced"),
    [
        *((143, "570.124.06", False), (143, "575.51.03", True), (109, "565.57.01", False)),
        *((109, "570.86.15", True), (48, "550.54.15", False), (48, "580.95.05", True), (48, None, False)),
        *((48, "unknown", False), (158, "580.95.05", True), (159, "580.95.05", True), (158, None, False)),
        (119, "580.95.05", False),
    ],
)
def test_the_driver_that_announces_an_error_by_xid_154(number, driver, announced):
    assert xid_catalogue()[number].is_announced(driver) is announced


def test_an_error_without_a_row_keeps_work_off():
    verdict = verdict_of_event(173)
    assert (verdict.keeps_off, verdict.label) == (True, "173")


def test_an_administrator_decides_what_keeps_nothing_off():
    assert not verdict_of_event(79, ignored=frozenset({79})).keeps_off
    seen = XidsSeen(findings={kernel_xid(line(149, "NETIR_LINK_DOWN", 0x11)).finding: 0.0})
    (verdict,) = judge_xids(seen, XidRules(now=0.0, ignored=frozenset({149})))
    assert (verdict.keeps_off, verdict.is_known) == (False, True)


# The decode table of XIDs 144 to 150: the names and the low bits, and its statuses.

_PIPES = {"RESET_GPU": [0x4], "IGNORE": [0x1, 0x2, 0x80000000]}
DECODE = [
    (144, "SAW_MVB", "SAW_MVB", 0b0000100001, 0b0000001, {"RESET_GPU": [2, 0x10], "IGNORE": [1, 4, 8, 0x20]}),
    (145, "RLW_CTRL", "RLW_CTRL", 0b0001100010, 0b0000011, {"IGNORE": [0x80000000]}),
    (
        *(145, "RLW_REMAP", "RLW_REMAP", 0b0010000010, 0b0000100),
        {
            "XID_154_EVAL": [1, 2],
            "CHECK_NVLINK_FAILURE_FLOW": [4, 8, 0x10, 0x20],
            "RESET_GPU": [0x40, 0x80],
            "IGNORE": [0x100, 0x200, 0x80000000],
        },
    ),
    (145, "RLW_RSPCOL", "RLW_RSPCOL", 0b0010100010, 0b0000101, {"RESET_GPU": [2], "IGNORE": [1, 0x80000000]}),
    (145, "RLW_RXPIPE", "RLW_RXPIPE", 0b0011000010, 0b0000110, {"IGNORE": [1, 2, 4, 8, 0x80000000]}),
    (
        *(145, "RLW_SRC_TRACK", "RLW_SRC_TRACK", 0b0011100010, 0b0000111),
        {"RESET_GPU": [1, 0x10, 0x20], "XID_154_EVAL": [4, 8], "IGNORE": [2, 0x80000000]},
    ),
    (
        *(145, "RLW_TAGSTATE", "RLW_TAGSTATE", 0b0100000010, 0b0001000),
        {"RESET_GPU": [2, 0x20000, 0x100000], "IGNORE": [1, 0x10000, 0x80000000]},
    ),
    (146, "TLW_CTRL", "TLW_CTRL", 0b0100100011, 0b0001001, _PIPES),
    (146, "TLW_RX", "TLW_RX_PIPE0", 0b0101000011, 0b0001010, _PIPES),
    (146, "TLW_RX", "TLW_RX_PIPE1", 0b0101000011, 0b0001011, _PIPES),
    (146, "TLW_TX", "TLW_TX_PIPE0", 0b0101100011, 0b0001100, _PIPES),
    (146, "TLW_TX", "TLW_TX_PIPE1", 0b0101100011, 0b0001101, _PIPES),
    (147, "TREX", "TREX", 0b0110000100, 0b0001110, {"IGNORE": [1, 0x80000000]}),
    (148, "NVLPW_CTRL", "NVLPW", 0b0000000101, 0b0001111, {"IGNORE": [0x80000000]}),
    (149, "NETIR", "NETIR_INT", 0b0000000110, 0b0011000, {"RESET_GPU": [0, 5]}),
    (149, "NETIR_LINK_EVT", "NETIR_LINK_DOWN", 0b0111000110, 0b0010001, {"RESET_GPU": [0, 7]}),
    (149, "NETIR_BER_EVENT", "NETIR_BER_EVENT", 0b1000100110, 0b0010011, {"IGNORE": [0, 1, 2, 3]}),
    (
        *(149, "NETIR_MFDE_EVENT", "NETIR_MFDE_EVENT", 0b1001000110, 0b0010100),
        {"RESET_GPU": [1, 4, 5, 7], "IGNORE": [3]},
    ),
    (150, "MSE Degraded", "MSE_WATCHDOG", 0, 0, {"RESET_GPU": [0, 0xFFFFFFFF]}),
]
LINK_DOWN_DETAILS = {
    "RESET_GPU": "000000 000001 000010 000100 001010 001111 010000 010001 010010 010101 010110"
    " 100000 100001 100010 100011 100100 100101 101010 101011",
    "IGNORE": "100110 101000",
}


def line(number, unit, info, status=0, severity="Nonfatal", place="0008:01:00", link=14):
    words = " ".join(f"0x{word:08x}" for word in (info, status, 0, 0, 0, 0))
    return f"NVRM: Xid (PCI:{place}): {number}, {unit} {severity} XC0 i0 Link {link:02} ({words})"


def test_each_row_of_the_decode_table():
    takes_any_status = {
        "NETIR",
        "NETIR_INT",
        "NETIR_LINK_EVT",
        "NETIR_LINK_DOWN",
        "MSE Degraded",
        "MSE_WATCHDOG",
    }
    for number, old, new, old_bits, new_bits, actions in DECODE:
        listed = {status: action for action, statuses in actions.items() for status in statuses}
        for (unit, bits), status in itertools.product(
            ((old, old_bits), (new, new_bits)), {*listed, 0, *(1 << bit for bit in range(32))}
        ):
            # The bits between unit and detail belong to the reader.
            text = line(number, unit, bits | 0b101 << 12, status)
            finding = kernel_xid(text).finding
            action = "RESET_GPU" if unit in takes_any_status else listed.get(status, "")
            assert (finding.number, finding.action, finding.link) == (number, action, 14), text


@pytest.mark.parametrize("unit", [("NETIR_LINK_EVT ", 0b0111000110), ("NETIR_LINK_DOWN", 0b0010001)])
@pytest.mark.parametrize("action", LINK_DOWN_DETAILS)
def test_the_detail_of_a_link_that_went_down(unit, action):
    for detail in LINK_DOWN_DETAILS[action].split():
        text = line(149, unit[0], int(detail, 2) << 20 | unit[1], severity="Fatal  ")
        assert kernel_xid(text).finding.action == action, detail


def test_an_error_that_the_driver_made_fatal():
    for info in (0b10011000010, 0b10000110):
        for status in (1, 2, 4):
            assert kernel_xid(line(145, "RLW_RXPIPE", info, status)).finding.action == "RESET_GPU"
    assert kernel_xid(line(145, "RLW_RXPIPE", 0b110, 1, "Fatal")).finding.action == "RESET_GPU"
    assert kernel_xid(line(145, "RLW_RXPIPE", 0b10000110, 8)).finding.action == "IGNORE"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (line(145, "RLW_REMAP", 4, 0x400), "unlisted-subcode"),
        (line(145, "RLW_NEW", 4, 1), "unlisted-subcode"),
        ("NVRM: Xid (PCI:0008:01:00): 145", "no-registers"),
        ("NVRM: Xid (PCI:0008:01:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 14", "no-registers"),
    ],
)
def test_a_subcode_without_a_row_is_unknown_unless_it_is_fatal(text, missing):
    (verdict,) = judge_xids(XidsSeen(findings={kernel_xid(text).finding: 0.0}), XidRules(now=0.0))
    assert (verdict.label, verdict.keeps_off, verdict.is_known) == (f"145-{missing}", False, False)
    assert kernel_xid(line(145, "RLW_NEW", 4, 1, "Fatal")).finding.action == "RESET_GPU"


@pytest.mark.parametrize(
    ("registers", "action"),
    [
        ("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "RESET_GPU"),
        ("0x0, 0x0, 0x4, 0x0, 0x0, 0x0, 0x0", "RESET_GPU"),
        ("0x0, 0x0, 0x0, 0x80000, 0x0, 0x0, 0x0", "RESET_GPU"),
        ("0x0, 0x0, 0x0, 0x0, 0x40000, 0x0, 0x0", "RESET_GPU"),
        ("0x100002, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "CHECK_NVLINK_FAILURE_FLOW"),
        ("0x0, 0x0, 0x0, 0x70000, 0x0, 0x0, 0x0", "CHECK_NVLINK_FAILURE_FLOW"),
        ("0x40800001, 0x0, 0x0, 0x0, 0x24900000, 0x0, 0x0", "IGNORE"),
    ],
)
def test_the_registers_of_an_older_nvlink(registers, action):
    text = f"NVRM: Xid (PCI:0000:a3:00): 74, NVLink: fatal error detected on link 8({registers})"
    finding = kernel_xid(text).finding
    assert (finding.action, finding.link) == (action, 8)


# Lines.

PROCESSES = st.one_of(
    st.just("pid='<unknown>', name=<unknown>, "),
    st.builds(
        "pid={}, name={}, ".format,
        st.integers(0, 4194304),
        st.one_of(
            st.sampled_from(
                ["ray::WorkerDict", "0x0 0x1 (0x2)", "a, b, c", "to 0x0, SAW", "link 3, X Fatal"]
            ),
            st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="\\"), max_size=15),
            st.just("\\x1b\\x5c, \\xc3\\xa9" * 2),
        ),
    ),
)


@given(process=PROCESSES)
def test_the_name_of_a_process_changes_no_verdict(process):
    """A tenant chooses the name. It has at most 15 bytes, and the kernel escapes special ones."""
    for number, body in (
        (149, line(149, "NETIR_LINK_DOWN", 0x00200011, severity="Fatal  ")),
        (145, line(145, "RLW_REMAP", 4, 0x10)),
        (145, "NVRM: Xid (PCI:0008:01:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 14"),
        (74, "NVRM: Xid (PCI:0008:01:00): 74, NVLink: error on link 14(0x20000000, 0x0, 0x0, 0x10, 0x0)"),
        (154, RESET_ASKED),
    ):
        named = body.replace(f"{number}, ", f"{number}, {process}", 1)
        assert kernel_xid(named) == kernel_xid(body), named


@pytest.mark.parametrize(
    ("text", "place", "number"),
    [
        ("NVRM: Xid (PCI:0000:3B:00): 79, pid=0, GPU has fallen off the bus.", "0000:3b:00", 79),
        ("NVRM: Xid (PCI:0009:01:00.0): 48, pid=1, DBE", "0009:01:00", 48),
        ("NVRM: Xid (PCI:00000009:01:00 GPU-I:05): 94, Contained", "0009:01:00", 94),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "0000:03:00", 14),
    ],
)
def test_the_forms_of_a_line(text, place, number):
    found = kernel_xid(text, sequence=7)
    assert (found.pci_address, found.number, found.sequence, found.finding) == (place, number, 7, None)


@pytest.mark.parametrize(
    ("change", "recovery"),
    [
        ("from 0x0 (None) to 0x1 (GPU Reset Required)", RecoveryAction.GPU_RESET),
        ("from 0x0 (None) to 0x2 (Node Reboot Required)", RecoveryAction.NODE_REBOOT),
        ("from 0x0 (None) to 0x2 (OS Reboot)", RecoveryAction.NODE_REBOOT),
        ("from 0x0 (None) to 0x3 (Drain P2P)", RecoveryAction.DRAIN_P2P),
        ("from 0x1 (GPU Reset Required) to 0x4 (Drain and Reset)", RecoveryAction.DRAIN_AND_RESET),
        ("from 0x0 (None) to 0x5 (Recover IMEX Domain)", RecoveryAction.RECOVER_IMEX_DOMAIN),
        ("from 0x4 (Drain and Reset) to 0x0 (None)", RecoveryAction.NONE),
        ("from 0x0 (None) to 0x2a (New)", RecoveryAction.SYSTEM_REBOOT),
        ("from 0x0 (None) to something", None),
    ],
)
def test_the_action_that_xid_154_names(change, recovery):
    found = kernel_xid(f"NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed {change}")
    assert (found.number, found.recovery) == (154, recovery)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"NVRM: Xid (PCI:0000:3b:00): 79, no head",
        b"4,5;NVRM: Xid (PCI:0000:3b:00): 79, short head",
        b"x,5,6,-;NVRM: Xid (PCI:0000:3b:00): 79, priority",
        b"4," + b"9" * 5000 + b",6,-;NVRM: Xid (PCI:0000:3b:00): 79, sequence",
        kernel_record("NVRM: Xid (PCI:0000:3b:00): 123456, number"),
        kernel_record("NVRM: Xid (PCI:zz): 79, place"),
        kernel_record("usb 1-1: NVRM: Xid (PCI:0000:3b:00): 79, of another driver"),
        kernel_record("NVRM: Xid (PCI:0000:3b:00): 79, a program wrote it", facility=USER),
        b"4,5,6,-;text\n NVRM: Xid (PCI:0000:3b:00): 79, in the dictionary",
    ],
)
def test_what_is_no_line_of_the_driver(record):
    assert parse_kernel_record(record) is None


@given(record=st.binary(max_size=300), text=st.text(max_size=200))
@example(record=b"\xff,\xff;\xff", text="145, RLW_REMAP Nonfatal (0x")
def test_no_record_stops_the_parser(record, text):
    parse_kernel_record(record)
    parse_kernel_record(kernel_record(f"NVRM: Xid (PCI:0008:01:00): {text}"))
    parse_kernel_record(kernel_record(f"NVRM: Xid (PCI:0008:01:00): 149, {text}"))


# Events, lines and XID 154 in every order.

GPU = NodeGpu(
    minor=0,
    uuid="GPU-1",
    pci_address="0008:01:00.0",
    product="NVIDIA GB300",
    memory_bytes=1 << 38,
    recovery=RecoveryAction.NONE,
)
RESET_ASKED = (
    "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
)
LINKS = {
    "149 event": XidError(uuid="GPU-1", number=149),
    "149 line": kernel_xid(line(149, "NETIR_LINK_DOWN", 0x11, severity="Fatal"), sequence=1),
    "145 event": XidError(uuid="GPU-1", number=145),
    "145 line": kernel_xid(line(145, "RLW_REMAP", 4, 0x10), sequence=2),
    "145 other line": kernel_xid(line(145, "RLW_SRC_TRACK", 7, 0x4), sequence=3),
    "145 new line": kernel_xid(line(145, "RLW_REMAP", 4, 0x400), sequence=4),
    "45 event": XidError(uuid="GPU-1", number=45),
    "79 line": kernel_xid("NVRM: Xid (PCI:0008:01:00): 79, GPU has fallen off the bus.", sequence=5),
    "154 event": XidError(uuid="GPU-1", number=154),
    "154 reset": kernel_xid(RESET_ASKED, sequence=6),
    "154 drained": kernel_xid(RESET_ASKED.replace("0x1 (GPU Reset", "0x4 (Drain and Reset"), sequence=7),
}


def arrived(items, gpu=GPU, gap=0.4):
    """The condition after errors that arrive one after the other, all within the time of a line."""
    looked = InventorySnapshot(inventory=GpuInventory(gpus=(gpu,), driver_version="580.95.05"), at=0.0)
    known = update_conditions({}, looked, XidRules(now=0.0))
    for index, item in enumerate(items):
        events, lines = ([item], []) if isinstance(item, XidError) else ([], [item])
        known = record_errors(known, events, lines, 1.0 + index * gap)
    return known["GPU-1"]


def seen_as(condition, at, **rules):
    judged = XidRules(now=at, **rules)
    taints = [
        (taint.key.rpartition("/")[2], taint.value, taint.effect) for taint in gpu_taints(condition, judged)
    ]
    return taints, gpu_health(condition, judged)


@pytest.mark.parametrize(
    ("names", "taints", "health"),
    [
        (["149 event", "149 line"], [("xid", "149", "NoSchedule")], Health.UNHEALTHY),
        (
            ["149 event", "149 line", "154 reset"],
            [("xid", "149", "NoSchedule"), ("recovery", "gpu-reset", "NoSchedule")],
            Health.UNHEALTHY,
        ),
        (["145 event", "145 other line"], [("xid", "145", "None")], Health.HEALTHY),
        (["145 event", "145 line"], [("xid", "145-needs-domain-view", "None")], Health.UNKNOWN),
        (
            ["145 event", "145 other line", "154 reset"],
            [("xid", "145", "None"), ("recovery", "gpu-reset", "NoSchedule")],
            Health.UNHEALTHY,
        ),
        (
            ["145 event", "145 new line", "45 event"],
            [("xid", "145-unlisted-subcode", "None")],
            Health.UNKNOWN,
        ),
        (["149 event", "45 event"], [("xid", "149-no-kernel-line", "None")], Health.UNKNOWN),
        (["154 event"], [], Health.HEALTHY),
        (
            ["154 drained", "154 reset"],
            [("recovery", "drain-and-reset", "NoSchedule")],
            Health.UNHEALTHY,
        ),
    ],
)
def test_every_order_of_event_line_and_154_means_the_same(names, taints, health):
    for order in itertools.permutations(names):
        found, (state, _) = seen_as(arrived(LINKS[name] for name in order), 10.0)
        assert (found, state) == (taints, health), order


@given(names=st.lists(st.sampled_from(sorted(LINKS)), max_size=10), data=st.data())
def test_the_order_of_arrival_never_matters(names, data):
    order = data.draw(st.permutations(names))
    reported = data.draw(st.sampled_from([RecoveryAction.NONE, None]))
    gpu = msgspec.structs.replace(GPU, recovery=reported)
    first, second = (arrived([LINKS[name] for name in some], gpu) for some in (names, order))
    assert seen_as(first, 10.0) == seen_as(second, 10.0)


def test_an_error_waits_for_its_line_and_then_says_that_it_did_not_come():
    condition = arrived([LINKS["149 event"]])
    assert seen_as(condition, 1.0 + LINE_SECONDS - 0.1)[0] == [("xid", "149", "None")]
    taints, (state, reason) = seen_as(condition, 1.0 + LINE_SECONDS)
    assert (taints, state) == ([("xid", "149-no-kernel-line", "None")], Health.UNKNOWN)
    assert reason.endswith("its subcode is unknown: the kernel log had no line in 5 s")


def test_an_error_does_not_wait_for_a_log_that_cannot_be_read():
    taints, (state, reason) = seen_as(
        arrived([LINKS["149 event"]]), 1.0, log_trouble="/dev/kmsg: not permitted"
    )
    assert (taints, state) == ([("xid", "149-no-kernel-log", "None")], Health.UNKNOWN)
    assert reason.endswith("cannot read the kernel log: /dev/kmsg: not permitted")


def test_lines_that_the_kernel_overwrote_are_named():
    condition = arrived([LINKS["149 event"]])
    taints, (state, reason) = seen_as(condition, 7.0, log_lost_at=1.5)
    assert (taints, state) == ([("xid", "149-kernel-log-lost", "None")], Health.UNKNOWN)
    assert "overwrote" in reason
    assert seen_as(condition, 7.0, log_lost_at=-5.0)[0] == [("xid", "149-no-kernel-line", "None")]


def test_the_line_of_an_earlier_error_explains_no_later_one():
    condition = arrived([LINKS["145 other line"], LINKS["145 event"]], gap=LINE_SECONDS + 1)
    assert seen_as(condition, 20.0)[0] == [("xid", "145-no-kernel-line", "None")]


def test_a_line_of_another_gpu_is_not_ours():
    elsewhere = kernel_xid(line(149, "NETIR_LINK_DOWN", 0x11, place="0009:01:00"))
    assert seen_as(arrived([elsewhere]), 10.0)[0] == []


def after_look(condition, gpu, at):
    """The condition after another look at the GPU."""
    looked = InventorySnapshot(inventory=GpuInventory(gpus=(gpu,), driver_version="580.95.05"), at=at)
    return update_conditions({"GPU-1": condition}, looked, XidRules(now=at))["GPU-1"]


def test_the_newest_word_of_the_driver_counts():
    asked = arrived([LINKS["154 reset"]])
    assert seen_as(asked, 2.0)[0] == [("recovery", "gpu-reset", "NoSchedule")]
    # The reading began before XID 154 came, so it cannot deny it.
    assert seen_as(after_look(asked, GPU, 0.5), 2.0)[0] == [("recovery", "gpu-reset", "NoSchedule")]
    assert seen_as(after_look(asked, GPU, 11.0), 11.0)[0] == []


def test_an_announcement_that_nothing_can_take_back_ends_after_an_hour():
    old = msgspec.structs.replace(GPU, recovery=None)
    asked = arrived([LINKS["154 reset"]], old)
    assert seen_as(after_look(asked, old, 3600.0), 3600.0)[0] == [("recovery", "gpu-reset", "NoSchedule")]
    assert seen_as(after_look(asked, old, 3601.0), 3601.0)[0] == []


@given(
    names=st.lists(st.sampled_from(sorted(LINKS)), max_size=8),
    reported=st.sampled_from([RecoveryAction.NONE, None]),
)
def test_every_taint_of_an_error_has_an_end(names, reported):
    gpu = msgspec.structs.replace(GPU, recovery=reported)
    condition = after_look(arrived([LINKS[name] for name in names], gpu), gpu, 3700.0)
    assert seen_as(condition, 3700.0) == ([], (Health.HEALTHY, ""))
