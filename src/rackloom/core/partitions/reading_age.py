"""How long a reading of a switch controller counts as evidence of the present. The only such rule.

Two ages matter:

- `valid_seconds`: the age at which a reading says nothing about now. Every reader of the records applies it
  at the time of its own reading, so it needs no write. It holds with a full disk, a read-only database, a
  reconciler that hangs, a process that was stopped and resumed, and after a restart.
- `READING_VALID_SECONDS`: how much older than another reading of the same domain a reading may be and still
  count beside it. It bounds the first age too: no reading counts alone that would not count beside another.

A reconciler that works reads each domain once in an interval, or records that it could not. A reading is
then at most one interval and the time of one reading old. Two more intervals allow for a pass that waited
for its turn, or had operations to carry out.
"""

READING_VALID_SECONDS = 600.0
"""A reading that is so much older than another is no evidence of the present: that controller is not read."""
INTERVALS = 3
READ_SECONDS = 40.0
"""Bound on one reading: every protocol reads a domain in four calls with a deadline of ten seconds. NMX-C has
five calls, of which two have a deadline of five."""
DEFAULT_INTERVAL = 60.0
"""Seconds between two passes over a domain, where no configuration says otherwise."""


def valid_seconds(interval: float) -> float:
    """The age at which a reading is outdated, if each domain is read every `interval` seconds."""
    return min(INTERVALS * interval + READ_SECONDS, READING_VALID_SECONDS)


DEFAULT_VALID_SECONDS = valid_seconds(DEFAULT_INTERVAL)
