"""Transfer records in files, each replaced whole or not at all (`durable_files`)."""

from pathlib import Path

import msgspec

from rackloom.core.transfer.records import TransferRecord
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.durable_files import write_durably
from rackloom.runtime.foreign_text import decode_json


def save_record(record: TransferRecord, file: Path) -> None:
    """Write the record whole or not at all. If it cannot be written, a file of that name stays as it was.

    Raises:
        Refused: the disk is full, or the place cannot be written to.
    """
    write_atomically(msgspec.json.format(msgspec.json.encode(record), indent=1), file)


def write_atomically(content: bytes, file: Path) -> None:
    """Put `content` beside `file`, then in its place.

    Raises:
        Refused: the disk is full, or the place cannot be written to.
    """
    try:
        # A record holds no secret.
        write_durably(file, content, mode=0o644)
    except OSError as error:
        raise Refused(
            f"{file} could not be written: {error.strerror}",
            nearest_fix="name a place with room for it; the RESULT lines above are the runs",
        ) from error


def load_record(file: Path) -> TransferRecord:
    """The record in `file`.

    Raises:
        Refused: there is none.
    """
    try:
        return decode_json(file.read_bytes(), str(file), TransferRecord)
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}", nearest_fix="name a file that can be read") from error
    except Undecodable as error:
        raise Refused(
            f"{file} is no transfer record: {error.reason}", nearest_fix="save one with `transfer run --save`"
        ) from error
