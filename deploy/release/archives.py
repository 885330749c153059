"""Reproducible archives: sorted, with one time and without owners."""

import gzip
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path


def write_tar_gz(target: Path, files: list[tuple[str, Path]], seconds: int) -> None:
    """Write files under their names; all of them are `seconds` after the epoch old."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=seconds, compresslevel=9) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, path in sorted(files):
            info = tarfile.TarInfo(name)
            content = path.read_bytes()
            info.size, info.mtime, info.mode = len(content), seconds, 0o644
            tar.addfile(info, io.BytesIO(content))
    target.write_bytes(packed.getvalue())


def files_below(folder: Path, prefix: str, suffixes: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Files of a folder under a prefix; with `suffixes`, those whose names end so."""
    for path in folder.rglob("*"):
        if path.is_file() and (not suffixes or path.name.endswith(suffixes)):
            yield f"{prefix}/{path.relative_to(folder)}", path
