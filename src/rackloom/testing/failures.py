"""Errors of simulated sites."""


class SiteFailed(RuntimeError):
    """A site did not start, or ended unexpectedly. The text gives the reason and the end of its output."""


class StepNotObserved(AssertionError):
    """A step was played and did not come about. The text is the observation."""


class TimedOut(AssertionError):
    """A condition did not come about in time."""
