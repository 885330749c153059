"""The two ways in which a selector fails: it does not compile, or it has no answer for one device.

Messages follow upstream's texts, because users compare them. `CompileError` also gives line and column,
and a hint if a replacement is known. `CostExceeded` is the one evaluation error that no operator absorbs.
"""

KEY_HINT = "consider .? with orValue, or has(), for attributes that a device may lack"


class CompileError(ValueError):
    """The expression is refused before it runs on any device.

    `line` and `column` count from 1. `hint` gives the replacement, if one is known.
    """

    def __init__(
        self, message: str, *, line: int = 1, column: int = 1, hint: str | None = None, source: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column
        self.hint = hint
        self.source = source

    def __str__(self) -> str:
        lines = [f"ERROR: <input>:{self.line}:{self.column}: {self.message}"]
        rows = self.source.split("\n")
        if 0 < self.line <= len(rows) and self.source:
            lines += [f" | {rows[self.line - 1]}", f" | {'.' * (self.column - 1)}^"]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class EvaluationError(Exception):
    """The expression has no truth value for this device. Upstream then aborts the scheduling attempt."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message} ({hint})")
        self.message = message
        self.hint = hint


class CostExceeded(EvaluationError):
    """Evaluation cost more than the limit. No operator absorbs this error."""

    def __init__(self) -> None:
        super().__init__("operation cancelled: actual cost limit exceeded")


def no_such_key(key: str) -> EvaluationError:
    """A missing map key, with the advice that goes with it."""
    return EvaluationError(f"no such key: {key}", hint=KEY_HINT)


def no_such_overload(function: str = "") -> EvaluationError:
    """Operands of types that the function has no form for."""
    return EvaluationError(f"no such overload: {function}" if function else "no such overload")
