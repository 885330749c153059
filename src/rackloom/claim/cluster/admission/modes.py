"""What becomes of a problem: a warning, or a denial."""

from enum import StrEnum

from rackloom.claim.cluster.admission.reviews import Verdict


class Mode(StrEnum):
    """Whether an object with a problem is stored."""

    WARN = "warn"
    ENFORCE = "enforce"


def judged(problems: tuple[str, ...], mode: Mode, denial: str, rule: str) -> Verdict:
    """A verdict by one `rule` that names all problems at once; `denial` begins the text of a refusal."""
    if not problems:
        return Verdict()
    if mode is Mode.WARN:
        return Verdict(warnings=problems, rules=((rule, "warned"),))
    return Verdict(allowed=False, message=f"{denial}: {'; '.join(problems)}", rules=((rule, "denied"),))
