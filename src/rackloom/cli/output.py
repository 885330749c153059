"""How a command prints: a plain table for people, JSON or YAML for programs.

Tables are plain text: rich costs a quarter of the time a local command may take, so it is left to progress
bars.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

Format = Literal["table", "json", "yaml"]
Output = Annotated[Format, Parameter(name=["--output", "-o"])]


def emit(value: object, output: Format, table: Callable[[], str]) -> None:
    """Print `value` (anything msgspec can encode) as JSON or YAML, or what `table` returns."""
    if output == "json":
        print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    elif output == "yaml":
        import yaml

        print(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False), end="")
    else:
        print(table())


def columns(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Left-aligned text columns, two spaces apart."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(headers))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
