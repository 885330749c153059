"""Where a release comes from: an in-toto statement v1 with a SLSA provenance v1 predicate.

Its subjects are all artefacts with their digests; its materials the git commit and the files of pins. It has
no times and names no machine, so that two builds of one commit give the same statement.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

Object = dict[str, Any]
BUILD_TYPE = "urn:rackloom:make-release:1"
"""SECURITY.md describes it."""
PINS = (
    "requirements/runtime.txt",
    "requirements/nixl.txt",
    "requirements/build.txt",
    "deploy/image/packages.lock",
    "deploy/image/packages.toml",
)


def statement(
    *, source: Path, version: str, ref: str, commit: str, seconds: int, builder: str, artefacts: list[Path]
) -> bytes:
    """The statement about artefacts that were built from a source tree at a commit."""
    materials: list[Object] = [{"uri": f"git+rackloom@{ref}", "digest": {"gitCommit": commit}}]
    materials += [{"uri": f"file:{name}", "digest": {"sha256": digest(source / name)}} for name in PINS]
    document = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": digest(path)}} for path in sorted(artefacts)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"version": version, "ref": ref},
                "internalParameters": {"SOURCE_DATE_EPOCH": seconds},
                "resolvedDependencies": materials,
            },
            "runDetails": {"builder": {"id": builder}},
        },
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def digest(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal text."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
