"""XIDs: the errors that NVIDIA's driver reports of a GPU, and whether they keep new work off it. Pure.

`xid_catalogue.csv` holds NVIDIA's Xid catalogue: the action that each number prescribes, and the driver
from which XID 154 announces the action of that error (`linked`). The action of 162, 167, 169, 171 and 172 is
blank. 163 to 166, 168 and 170 have text in its place. 162 reports a repair, and the text of 163 to 165
requires no reset, so these are IGNORE here. The others stay blank, and keep work off.

NVML reports only the number. XIDs 144 to 150 and 74 mean nothing without the line that the driver writes
to the kernel log:

    NVRM: Xid (PCI:0008:01:00): 145, RLW_REMAP Nonfatal XC1 i0 Link 10 (0x00000004 0x00000010 0x0 ...)
    NVRM: Xid (PCI:0008:01:00): 149, pid=4118, name=python3, NETIR_LINK_DOWN Fatal XC0 i0 Link 14 ...
    NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)

`nvlink_xids.csv` holds the decode table of XIDs 144 to 150. The unit stands in the text, under one name
before driver R575 and another since. The detail is bits 25 to 20 of the first word, and the status is the
second word. XID 154 has the number of NVML's recovery action. A tenant chooses the name of the process, so
the parser drops it before it reads.

`judge_xids` is a function of the set of events and lines that a GPU had, so their order does not matter.
A number that needs a line is unknown until one came: within 5 s of the event, or before it. Some lines mean
that another GPU or a switch may be at fault (CHECK_NVLINK_FAILURE_FLOW). Only the view of the whole NVLink
domain can show which, so they keep nothing off. XID_154_EVAL keeps nothing off either: the recovery that
XID 154 requests has a taint of the monitor.

`keep_xids` ends them. An error that keeps nothing off is over after 300 s. An error that keeps work off is
over after 300 s if the driver reports that it requests no recovery, and if this version of it would have
announced one. Otherwise nothing shows that the GPU is well again. Then the error is over after an hour,
because missing information must not keep a GPU off for ever.
"""

import csv
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from rackloom.claim.node.gpu.inventory import RecoveryAction
from rackloom.claim.node.plugin import NodeValue

# The catalogue.


REVISION = "NVIDIA Xid catalogue for Ampere and later, XIDs 1 to 172, read in November 2026"
"""NVIDIA gives the catalogue no revision number."""
QUIET_SECONDS = 300.0
"""How long an error is remembered after it was last seen."""
UNREPORTED_SECONDS = 3600.0
"""The same, for an error that keeps work off and of which nothing shows that it was repaired."""
LINE_SECONDS = 5.0
"""How long after an event its line of the kernel log may come."""

_HARMLESS = frozenset({"IGNORE", "RESTART_APP", "WORKFLOW_XID_45", "UPDATE_SWFW", "XID_154", "XID_154_EVAL"})
"""Actions that concern a program, a virtual GPU's software or another XID, and not this GPU."""
_NEED_LINE = frozenset({"WORKFLOW_NVLINK5_ERR", "WORKFLOW_NVLINK_ERR"})
_RESET = "RESET_GPU"
_DOMAIN = "CHECK_NVLINK_FAILURE_FLOW"
_UNLISTED = ""
"""The catalogue does not have this subcode."""
_NO_REGISTERS = "NO_REGISTERS"
"""The line does not have the words that hold the subcode."""
_WITH_THE_XID = "introduction"
RECOVERY_CHANGED = 154
_ERROR_OF_ANY_NVLINK = 74


class CatalogueRow(NodeValue, frozen=True, kw_only=True):
    """One number of the catalogue."""

    action: str
    linked: str
    """The first driver whose XID 154 announces the action: `R565`, or `introduction` if every driver that has
    the number does. Empty if none does."""
    meaning: str

    def is_announced(self, driver: str | None) -> bool:
        """Whether XID 154 of this version of the driver announces the action."""
        release = (driver or "").partition(".")[0]
        if not self.linked or not release.isdecimal():
            return False
        return self.linked == _WITH_THE_XID or int(release) >= int(self.linked[1:])


@cache
def xid_catalogue() -> Mapping[int, CatalogueRow]:
    """Every number of the catalogue."""
    return {
        int(row["xid"]): CatalogueRow(action=row["action"], linked=row["linked"], meaning=row["meaning"])
        for row in _rows("xid_catalogue.csv")
    }


@cache
def _nvlink_rows() -> Mapping[tuple[int, str, int], list[dict[str, str]]]:
    """The decode table by number, name of the unit and detail."""
    rows: dict[tuple[int, str, int], list[dict[str, str]]] = {}
    for row in _rows("nvlink_xids.csv"):
        for unit in row["unit"].split():
            rows.setdefault((int(row["xid"]), unit, int(row["detail"], 2)), []).append(row)
    return rows


def _rows(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / name).open(newline="") as file:
        return list(csv.DictReader(file))


# Lines of the kernel log.


class XidFinding(NodeValue, frozen=True, kw_only=True):
    """The part of a line that decides the meaning of the error."""

    number: int
    action: str
    """Of the decode table, CHECK_NVLINK_FAILURE_FLOW, or NO_REGISTERS. Empty for a subcode that the table
    lacks."""
    unit: str = ""
    link: int | None = None


class KernelXid(NodeValue, frozen=True, kw_only=True):
    """One XID of the kernel log."""

    pci_address: str
    """Without the function: `0008:01:00`."""
    number: int
    sequence: int
    """Of the record: it orders two records of one boot."""
    finding: XidFinding | None = None
    """Of the numbers that need a line."""
    recovery: RecoveryAction | None = None
    """The action that XID 154 names."""
    at: float | None = None
    """The time of a record from before the log was opened. None if the time of the reading is near enough."""


_KERNEL = 0
"""The facility of the kernel's own records. The kernel gives records that programs write another one."""
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-f]{1,8}):([0-9a-f]{2}:[0-9a-f]{2})(?:\.[0-7])?(?: GPU-I:\d+)?\):"
    r" (\d{1,5})(?:, |$)(.*)",
    re.IGNORECASE,
)
# A name has up to 15 bytes. It may have commas, and the kernel writes a special byte as `\x1b`.
_PROCESS = re.compile(r"^pid=[^,]{1,40}, (?:name=(?:\\x[0-9a-f]{2}|[^\\]){0,15}, )?")
_NVLINK = re.compile(r"(\w+)(?:[ /]\w+)?\s+(?:Link )?(Fatal|Non-?fatal)\b", re.IGNORECASE)
_LINK = re.compile(r"\blink (\d{1,2})\b", re.IGNORECASE)
_REGISTERS = re.compile(r"[(\[]([0-9a-fx, ]*)[)\]]", re.IGNORECASE)
_WORDS = re.compile(r"0x([0-9a-f]{1,8})\b", re.IGNORECASE)
_RECOVERY = re.compile(
    r"GPU recovery action changed from 0x[0-9a-f]{1,2} \([^()]*\) to 0x([0-9a-f]{1,2})\b", re.IGNORECASE
)


def parse_kernel_record(record: bytes) -> KernelXid | None:
    """The XID of a record of /dev/kmsg (`priority,sequence,microseconds,flags;text`), if it is one."""
    head, separator, rest = record.decode("utf-8", "replace").partition(";")
    fields = head.split(",")
    if (
        not separator
        or len(fields) < 4
        or not all(re.fullmatch("[0-9]{1,20}", field) for field in fields[:3])
    ):
        return None
    found = _XID.match(rest.partition("\n")[0])
    if found is None or int(fields[0]) >> 3 != _KERNEL:
        return None
    domain, place, number, text = found.groups()
    text = _PROCESS.sub("", text)
    return KernelXid(
        pci_address=f"{int(domain, 16):04x}:{place.lower()}",
        number=int(number),
        sequence=int(fields[1]),
        finding=_decode(int(number), text),
        recovery=_recovery(text) if int(number) == RECOVERY_CHANGED else None,
    )


def recovery_action(number: int) -> RecoveryAction:
    """The action of a number. The strongest stands in for one that this version does not know."""
    return RecoveryAction(number) if number in list(RecoveryAction) else RecoveryAction.SYSTEM_REBOOT


def _recovery(text: str) -> RecoveryAction | None:
    # The texts differ between drivers (`Node Reboot Required`, `OS Reboot`). The number does not.
    found = _RECOVERY.match(text)
    return None if found is None else recovery_action(int(found[1], 16))


def _decode(number: int, text: str) -> XidFinding | None:
    row = xid_catalogue().get(number)
    if row is None or row.action not in _NEED_LINE:
        return None
    words = [int(word, 16) for group in _REGISTERS.findall(text)[-1:] for word in _WORDS.findall(group)]
    link = _LINK.search(text)
    unit, action = "", _old_nvlink_action(words)
    if number != _ERROR_OF_ANY_NVLINK:
        named = _NVLINK.match(text)
        unit = "" if named is None else named[1].upper()
        fatal = named is not None and named[2].lower() == "fatal"
        action = _nvlink_action(number, unit, fatal, words)
    return XidFinding(number=number, action=action, unit=unit, link=None if link is None else int(link[1]))


def _nvlink_action(number: int, unit: str, fatal: bool, words: list[int]) -> str:
    """The action of the decode table (XIDs 144 to 150)."""
    info, status = words[:2] if len(words) > 1 else (None, None)
    rows = [] if info is None else _nvlink_rows().get((number, unit, info >> 20 & 0x3F), [])
    for row in rows:
        if row["error"] and int(row["error"], 16) != status:
            continue
        if row["promoted"] and (fatal or _is_promoted(number, info or 0)):
            return row["promoted"]
        return _DOMAIN if row["investigate"] == _DOMAIN else row["action"]
    # Fatal means that the GPU loses a link or all of them, whichever the subcode.
    if fatal:
        return _RESET
    return _NO_REGISTERS if info is None else _UNLISTED


def _is_promoted(number: int, info: int) -> bool:
    """Whether the driver made an error fatal that need not be. Drivers before R575 have another layout."""
    is_old_layout = info & 0x1F == number - 143
    return bool(info & (1 << 10 if is_old_layout else 1 << 7))


def _old_nvlink_action(registers: list[int]) -> str:
    """The workflow of XID 74: seven registers, of which the first, third, fourth and fifth count."""
    first, _, third, fourth, fifth, *_ = [*registers, 0, 0, 0, 0, 0]
    if not registers:
        return _NO_REGISTERS
    # Corrected errors, and thresholds of them.
    first &= ~_bits(0, 23, 30)
    fifth &= ~_bits(20, 23, 26, 29)
    # Errors that follow from an error elsewhere.
    if first & ~_bits(1, 20) or third or fourth & ~_bits(16, 17, 18) or fifth:
        return _RESET
    return _DOMAIN if first or fourth else "IGNORE"


def _bits(*numbers: int) -> int:
    return sum(1 << number for number in numbers)


# The errors of a GPU, and their meaning.


class XidsSeen(NodeValue, frozen=True, kw_only=True):
    """The errors of one GPU, each with the time when it was seen last."""

    events: Mapping[int, float] = {}
    """By number, whichever source named it."""
    findings: Mapping[XidFinding, float] = {}

    def after(self, start: float) -> "XidsSeen":
        """The errors seen after a time."""
        return XidsSeen(
            events={number: at for number, at in self.events.items() if at > start},
            findings={finding: at for finding, at in self.findings.items() if at > start},
        )


class XidRules(NodeValue, frozen=True, kw_only=True):
    """The facts that decide about errors, besides the errors."""

    now: float
    ignored: frozenset[int] = frozenset()
    """Numbers that an administrator wants to keep nothing off."""
    log_trouble: str | None = None
    """Why the kernel log cannot be read, or None if it can."""
    log_lost_at: float | None = None
    """When the kernel last overwrote records before they were read."""


class XidVerdict(NodeValue, frozen=True, kw_only=True):
    """The meaning of one number for its GPU."""

    label: str
    """Of the taint: the number, and the source that is missing."""
    reason: str
    keeps_off: bool = False
    is_known: bool = True


def judge_xids(seen: XidsSeen, rules: XidRules) -> list[XidVerdict]:
    """A verdict for each number, in their order."""
    numbers = {*seen.events, *(finding.number for finding in seen.findings)}
    return [_judge(number, seen, rules) for number in sorted(numbers)]


def keep_xids(
    seen: XidsSeen, rules: XidRules, recovery: RecoveryAction | None, driver: str | None
) -> XidsSeen:
    """The errors that are not over. `recovery` is None if the driver does not report its request.

    `driver` is the driver's version, or None if it is not known.
    """

    def lasts(number: int, at: float, keeps_off: bool) -> bool:
        if keeps_off and recovery not in (None, RecoveryAction.NONE, RecoveryAction.RECOVER_IMEX_DOMAIN):
            return True
        row = xid_catalogue().get(number)
        is_reported = recovery is not None and row is not None and row.is_announced(driver)
        return rules.now - at < (QUIET_SECONDS if is_reported or not keeps_off else UNREPORTED_SECONDS)

    events, findings = seen.events.items(), seen.findings.items()
    return XidsSeen(
        events={number: at for number, at in events if lasts(number, at, _keeps_off(number, rules))},
        findings={
            found: at
            for found, at in findings
            if lasts(found.number, at, _keeps_off(found.number, rules, found))
        },
    )


def _keeps_off(number: int, rules: XidRules, finding: XidFinding | None = None) -> bool:
    """Whether an error keeps work off its GPU, by its number or by the line that it needs."""
    if number in rules.ignored:
        return False
    if finding is not None:
        return finding.action == _RESET
    row = xid_catalogue().get(number)
    return row is None or row.action not in _HARMLESS | _NEED_LINE


def _judge(number: int, seen: XidsSeen, rules: XidRules) -> XidVerdict:
    row, event = xid_catalogue().get(number), seen.events.get(number)
    found = {finding: at for finding, at in seen.findings.items() if finding.number == number}
    keeps_off = _keeps_off(number, rules) or any(_keeps_off(number, rules, finding) for finding in found)
    label, reason = (
        str(number),
        f"XID {number}: {'an error without a row in the catalogue' if row is None else row.meaning}",
    )
    if places := sorted({f"{f.unit} link {f.link}".strip() for f in found if f.link is not None}):
        reason += f" ({', '.join(places)})"
    missing, why = "", ""
    if not keeps_off and number not in rules.ignored and row is not None and row.action in _NEED_LINE:
        missing, why = _missing_source(found, event, rules)
    return XidVerdict(
        label=f"{label}-{missing}" if missing else label,
        reason=f"{reason}; {why}" if why else reason,
        keeps_off=keeps_off,
        is_known=not why,
    )


def _missing_source(
    found: Mapping[XidFinding, float], event: float | None, rules: XidRules
) -> tuple[str, str]:
    """The source that the judgement lacks, for the taint and in words. Both are empty if none is missing."""
    # A line from long before belongs to an earlier event.
    if event is not None and all(at < event - LINE_SECONDS for at in found.values()):
        if rules.log_trouble is not None:
            return "no-kernel-log", f"its subcode is unknown: cannot read the kernel log: {rules.log_trouble}"
        if rules.now - event < LINE_SECONDS:
            return "", "its line of the kernel log has not come yet"
        if rules.log_lost_at is not None and rules.log_lost_at >= event - LINE_SECONDS:
            reason = "its subcode is unknown: the kernel overwrote lines of its log before they were read"
            return "kernel-log-lost", reason
        return "no-kernel-line", f"its subcode is unknown: the kernel log had no line in {LINE_SECONDS:.0f} s"
    actions = {finding.action for finding in found}
    if _UNLISTED in actions:
        return "unlisted-subcode", "NVIDIA's catalogue does not list its subcode"
    if _NO_REGISTERS in actions:
        return "no-registers", "its subcode is unknown: its line of the kernel log has no registers"
    if _DOMAIN in actions:
        return "needs-domain-view", "a fault elsewhere in the NVLink domain may be its cause"
    return "", ""
