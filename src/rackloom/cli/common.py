"""What commands share: how they print, and parameters that environment variables may set.

`emit` prints a plain table for people, or JSON or YAML of the same value for programs. Tables are plain
text: rich takes a quarter of the time that a local command may take, so it is used for progress bars
only.
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


def env_parameter(name: str) -> Parameter:
    """A flag that an environment variable may set."""
    return Parameter(env_var=name)


def split_names(names: str) -> tuple[str, ...]:
    """Names that one variable gives with commas between."""
    return tuple(name.strip() for name in names.split(",") if name.strip())
