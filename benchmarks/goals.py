"""The goals of goals.toml: which rows of a benchmark have one, and whether a row meets it.

`make bench-quick` writes all goals into a table. A benchmark adds the goals of a row to the row (`judged`).
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

FILE = Path(__file__).with_name("goals.toml")


class Ratio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ratio that CI checks: its figure, and its two sides."""

    figure: float
    of: str


class Goal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limit of a field, for the rows of a benchmark that have the values of `rows`."""

    name: str
    benchmark: str
    rows: Mapping[str, Any]
    field: str
    at: Literal["most", "least"]
    limit: float | str
    """A number, or the field that has it."""
    command: str
    missed: str = ""
    """The figure of the last full run, if it missed the goal."""

    def limit_of(self, row: Mapping[str, Any]) -> float | None:
        """The limit of a row. None if the goal is not about it."""
        if self.field not in row or any(row.get(name) != value for name, value in self.rows.items()):
            return None
        return row.get(self.limit) if isinstance(self.limit, str) else self.limit

    def met(self, row: Mapping[str, Any]) -> bool | None:
        """Whether a row meets the goal. None if the goal is not about it."""
        if (limit := self.limit_of(row)) is None:
            return None
        return bool(row[self.field] <= limit if self.at == "most" else row[self.field] >= limit)


class Goals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of the file."""

    ratios: dict[str, Ratio]
    goal: list[Goal]


def read() -> Goals:
    """The goals and ratios of goals.toml."""
    return msgspec.convert(tomllib.loads(FILE.read_text()), Goals)


def judged(benchmark: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row with a field `goal_FIELD` for each of its goals, and with `met`."""
    limits: dict[str, float] = {}
    verdicts: list[bool] = []
    for goal in read().goal:
        if goal.benchmark == benchmark and (limit := goal.limit_of(row)) is not None:
            limits[f"goal_{goal.field}"] = limit
            verdicts.append(bool(goal.met(row)))
    return {**row, **limits, "met": all(verdicts)} if verdicts else row


def verdicts(goal: Goal, rows: list[dict[str, Any]]) -> Iterator[tuple[float, float, bool]]:
    """Figure, limit and verdict of each row that the goal is about."""
    for row in rows:
        limit, met = goal.limit_of(row), goal.met(row)
        if limit is not None and met is not None:
            yield row[goal.field], limit, met
