"""Errors of simulated sites."""


class SiteFailed(RuntimeError):
    """A site did not start, or ended by itself; the text says why and shows the end of its output."""


class StepNotObserved(AssertionError):
    """A step was played and did not come about; the text says what was observed instead."""


class TimedOut(AssertionError):
    """What was waited for did not come about in time."""
