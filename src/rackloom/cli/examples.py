"""`rackloom examples`: the manifests and scripts of the documentation, as files to edit."""

import shutil
from pathlib import Path

from rackloom.cli.common import note, with_common_flags
from rackloom.errors import Refused, file_error_text
from rackloom.runtime.shipped_files import shipped_path


@with_common_flags
def examples(directory: Path = Path("examples"), /) -> None:
    """Write the examples of the documentation into a directory, and print a line about each.

    Parameters
    ----------
    directory
        The directory to create. An existing one is refused.
    """
    try:
        shutil.copytree(shipped_path("examples"), directory)
    except FileExistsError:
        raise Refused(
            f"{directory} exists, and nothing is overwritten", nearest_fix="name another directory"
        ) from None
    except OSError as error:
        raise Refused(
            f"the examples cannot be written to {directory}: {file_error_text(error)}",
            nearest_fix="name a directory that you may write",
        ) from error
    for readme in sorted(directory.glob("*/README.md")):
        heading = readme.read_text().partition("\n")[0].lstrip("# ")
        print(f"{readme.parent}  {heading}")
    note("their documentation is in the README.md of each")
