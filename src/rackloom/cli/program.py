"""The console script: refuses Windows in one line, before it imports modules that Windows does not have."""

import sys


def unsupported_system() -> str | None:
    """The reason why Rackloom cannot run on this system, or None if it can."""
    if sys.platform == "win32":
        return "rackloom: runs on Linux and macOS; on Windows use the Windows Subsystem for Linux"
    return None


def main() -> None:
    """Run the command line, or print why this system cannot."""
    problem = unsupported_system()
    if problem is not None:
        sys.exit(problem)
    from rackloom.cli.main import main as run_command_line

    run_command_line()
