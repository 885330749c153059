"""What commands share: how they print, how they read files, and parameters from environment variables.

`emit` prints a plain table for people, or JSON or YAML of the same value for programs. Tables are plain
text: rich takes a quarter of the time that a local command may take, so it is used for progress bars
only.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from rackloom.errors import Refused, file_error_text

Format = Literal["table", "json", "yaml"]
Output = Annotated[Format, Parameter(name=["--output", "-o"])]
TableOrJson = Annotated[Literal["table", "json"], Parameter(name=["--output", "-o"])]
Flag = Annotated[bool, Parameter(negative="")]


def emit(value: object, output: Format, table: Callable[[], str]) -> None:
    """Print `value` (anything msgspec can encode) as JSON or YAML, or what `table` returns."""
    if output == "json":
        print(json_text(value))
    elif output == "yaml":
        import yaml

        print(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False), end="")
    else:
        print(table())


def json_text(value: object) -> str:
    """`value` as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def columns(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Left-aligned text columns, two spaces apart."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(headers))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def read_text(file: Path, fix: str) -> str:
    """The content of a file that an option names. Raises Refused with `fix` where it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file} cannot be read: {file_error_text(error)}", nearest_fix=fix) from error


def env_parameter(name: str) -> Parameter:
    """A flag that an environment variable may set."""
    return Parameter(env_var=name)


def split_names(names: str) -> tuple[str, ...]:
    """Names that one variable gives with commas between."""
    return tuple(name.strip() for name in names.split(",") if name.strip())
