"""Code that commands share: flags, printing, reading files, and parameters from the environment.

Flags that several commands have are declared here, so that they have one name and one meaning: `-o`, `-f`,
`-n`, `--kubeconfig`, `--context`. `with_common_flags` adds the flags that all commands have: `-q`, `-v`, and
`--json` if the command has `-o`.

A command has four kinds of output. Results go to standard output, whatever the flags (`emit`, `print`).
`announce` prints messages of a program that keeps running to standard output. `note` prints advice and
progress to standard error. `-q` leaves both out. Errors are raised.

`emit` prints a plain table for people, or JSON or YAML of the same value for programs. Tables are plain
text: rich takes a quarter of the time that a local command may take, so only progress bars use it.
"""

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import msgspec
from cyclopts import Parameter

from rackloom.errors import Misuse, Refused, file_error_text

P = ParamSpec("P")
T = TypeVar("T")

# Flags that several commands have.


Format = Literal["table", "json", "yaml"]
OUTPUT = Parameter(name=["--output", "-o"], help="The form of the output.")
Output = Annotated[Format, OUTPUT]
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
FILE = Parameter(name=["--file", "-f"])
"""One file or several, which may also be given without the flag."""
Files = Annotated[list[Path], FILE, Parameter(negative="", consume_multiple=True)]
NAMESPACE = Parameter(name=["--namespace", "-n"])
Kubeconfig = Annotated[
    Path | None,
    Parameter(
        name="--kubeconfig",
        help="The API server. Default: the service account of this pod, else $KUBECONFIG, else "
        "~/.kube/config.",
    ),
]
Kubectl = Annotated[
    Path | None,
    Parameter(name="--kubeconfig", help="The kubeconfig with which kubectl is asked; default: its own."),
]
KubeContext = Annotated[
    str | None,
    Parameter(name="--context", help="Another context of the kubeconfig than its current one."),
]

# Flags that all commands have.


def _added_flag(parameter: str, names: Sequence[str], text: str) -> inspect.Parameter:
    """A flag as an additional keyword parameter of a command."""
    described = Parameter(name=names, negative="", show_default=False, help=text)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(parameter, kind, default=False, annotation=Annotated[bool, described])


_EVERY_FLAG = (
    _added_flag("quiet", ["--quiet", "-q"], "Print results and errors only."),
    _added_flag(
        "verbose",
        ["--verbose", "-v"],
        "Log on standard error what is asked of which system, and how long it takes.",
    ),
)
_AS_JSON = _added_flag("as_json", ["--json"], "The same as --output json.")


def with_common_flags(function: Callable[P, T]) -> Callable[P, T]:
    """Add `-q` and `-v` to a command, and `--json` if it has `--output`. Raises Misuse when called."""
    own = inspect.signature(function)
    added = (*((_AS_JSON,) if "output" in own.parameters else ()), *_EVERY_FLAG)

    @wraps(function)
    def run(
        *args: Any, quiet: bool = False, verbose: bool = False, as_json: bool = False, **options: Any
    ) -> T:
        if as_json and options.setdefault("output", "json") != "json":
            raise Misuse(f"--json and --output {options['output']} are two formats: give one of them")
        is_for_programs = options.get("output", "table") != "table"
        with _speaking(quiet=quiet, verbose=verbose, is_for_programs=is_for_programs):
            return function(*args, **options)

    run.__signature__ = own.replace(parameters=(*own.parameters.values(), *added))  # type: ignore[attr-defined]
    run.__annotations__ = function.__annotations__ | {flag.name: flag.annotation for flag in added}
    return run  # type: ignore[return-value]


class _Speech:
    """The verbosity of the command that runs in this process."""

    is_quiet = False
    is_for_programs = False
    """True if the result is printed in a format for programs."""


@contextmanager
def _speaking(*, quiet: bool, verbose: bool, is_for_programs: bool) -> Iterator[None]:
    """Print less or more until the context ends."""
    if quiet and verbose:
        raise Misuse("--quiet and --verbose contradict each other: give one of them")
    _Speech.is_quiet, _Speech.is_for_programs = quiet, is_for_programs
    if verbose:
        from rackloom.serving.request_log import log_requests

        log_requests(_print_beside_progress)
    try:
        yield
    finally:
        _Speech.is_quiet = _Speech.is_for_programs = False
        if verbose:
            log_requests(None)


def _print_beside_progress(line: str) -> None:
    with beside_progress():
        print(line, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print advice or progress on standard error, unless `-q` was given."""
    if not _Speech.is_quiet:
        _print_beside_progress(text)


def shows_progress() -> bool:
    """True if a line that is updated in place may be shown.

    Requires a terminal, no `-q`, and no output format for programs.
    """
    return sys.stderr.isatty() and not _Speech.is_quiet and not _Speech.is_for_programs


def with_progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one. After a second, a terminal shows the number done and the remaining time."""
    with progress(what, len(items)) as step:
        for item in items:
            yield item
            step()


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total` items. `total` is None if the number is unknown.

    After the first second, a terminal shows the number done and updates it every second, even if the
    function is not called. At the end the line is cleared.
    """
    if not shows_progress():
        yield _count_nothing
        return
    line = _ProgressLine(what, total)
    thread = threading.Thread(target=line.run, daemon=True)
    thread.start()
    _ProgressLine.shown_now = line
    try:
        yield line.step
    finally:
        _ProgressLine.shown_now = None
        line.end()
        thread.join()


def _count_nothing() -> None:
    pass


class _ProgressLine:
    """The last line of a terminal, which a thread updates every second."""

    shown_now: "_ProgressLine | None" = None

    def __init__(self, what: str, total: int | None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._begun = time.monotonic()
        self._ended = threading.Event()
        self._is_shown = False
        self.lock = threading.Lock()
        """Held while a thread writes to the terminal."""

    def step(self) -> None:
        self._done += 1

    def end(self) -> None:
        self._ended.set()

    def run(self) -> None:
        while not self._ended.wait(_PROGRESS_SECONDS):
            text = progress_text(self._done, self._total, self._what, time.monotonic() - self._begun)
            with self.lock:
                self._is_shown = True
                print(f"{_CLEARED_LINE}{text}", end="", file=sys.stderr, flush=True)
        with self.lock:
            self.clear()

    def clear(self) -> None:
        if self._is_shown:
            self._is_shown = False
            print(_CLEARED_LINE, end="", file=sys.stderr, flush=True)


@contextmanager
def beside_progress() -> Iterator[None]:
    """Clear the progress line for the duration of the context, so that other lines may be printed."""
    line = _ProgressLine.shown_now
    if line is None:
        yield
        return
    with line.lock:
        line.clear()
        yield


def progress_text(done: int, total: int | None, what: str, seconds: float) -> str:
    """The number done. If it is above 0, also the rate and the expected end.

    Without a total, the text before the first item is `what` with the elapsed time.
    """
    if total is None and done <= 0:
        return f"{what} ({seconds:.0f} s)"
    counted = f"{done} {what}" if total is None else f"{done} of {total} {what}"
    if done <= 0 or seconds < _PROGRESS_SECONDS:
        return counted
    rate = f"{done / seconds:.1f} a second"
    if total is None:
        return f"{counted} ({rate})"
    return f"{counted} ({rate}, about {(total - done) * seconds / done:.0f} s left)"


_PROGRESS_SECONDS = 1.0
"""Seconds until progress is first shown, and between updates."""
_CLEARED_LINE = "\r\x1b[K"


def announce(text: str) -> None:
    """Print a message of a program that keeps running, unless `-q` was given."""
    if not _Speech.is_quiet:
        print(text, flush=True)


# Printing and reading.


def emit(value: object, output: Format, table: Callable[[], str]) -> None:
    """Print `value` (anything msgspec can encode) as JSON or YAML, or print the text that `table` returns."""
    print(table() if output == "table" else data_text(value, output))


def data_text(value: object, output: Literal["json", "yaml"]) -> str:
    """`value` (anything msgspec can encode) as JSON or YAML."""
    if output == "json":
        return json_text(value)
    import yaml

    return yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False).removesuffix("\n")


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
    """The content of a file that an option names. Raises Refused with `fix` if it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file} cannot be read: {file_error_text(error)}", nearest_fix=fix) from error


def env_parameter(name: str) -> Parameter:
    """A flag that an environment variable may set."""
    return Parameter(env_var=name)


def split_names(names: str) -> tuple[str, ...]:
    """Split the comma-separated names of one variable."""
    return tuple(name.strip() for name in names.split(",") if name.strip())
