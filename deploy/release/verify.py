"""`make verify-release DIST=folder SIGNERS=file`: whether a downloaded release is what was published.

Checks, in this order: the signature over SHA256SUMS, by a key that the file of signers has (the format of
ssh-keygen's ALLOWED SIGNERS); the digest of every file; that no file is there which is not in the sums; that
the provenance is about exactly these files. It uses nothing but Python and ssh-keygen.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

SUMS = "SHA256SUMS"
SIGNATURE = f"{SUMS}.sig"
NAMESPACE = "rackloom-release"


class NotVerified(Exception):
    """The release is not what was published, or that cannot be known; the text says why."""


def check_signature(folder: Path, signers: Path, identity: str) -> None:
    """The sums were signed by a key in the file of signers."""
    signature = folder / SIGNATURE
    if not signature.exists():
        raise NotVerified(f"this release is unsigned: it has no {SIGNATURE}")
    command = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", identity, "-n", NAMESPACE]
    done = subprocess.run(
        [*command, "-s", str(signature)],
        input=(folder / SUMS).read_bytes(),
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise NotVerified(
            f"the signature is not of {identity}: {(done.stderr or done.stdout).decode().strip()}"
        )


def check_digests(folder: Path) -> dict[str, str]:
    """Every file has the digest that the sums say, and there is no other; the digests by name."""
    lines = [
        re.fullmatch(r"([0-9a-f]{64})  ([\w.+-]+)", line) for line in (folder / SUMS).read_text().splitlines()
    ]
    if not lines or not all(lines):
        raise NotVerified(f"{SUMS} has a line that is no digest and name")
    listed = {line[2]: line[1] for line in lines if line}
    there = {path.name for path in folder.iterdir()} - {SUMS, SIGNATURE}
    if there != listed.keys():
        missing, more = sorted(listed.keys() - there), sorted(there - listed.keys())
        raise NotVerified(f"missing: {missing or 'nothing'}; not in {SUMS}: {more or 'nothing'}")
    for name, wanted in listed.items():
        with (folder / name).open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != wanted:
                raise NotVerified(f"{name} is not the file that {SUMS} has the digest of")
    return listed


def check_provenance(folder: Path, digests: dict[str, str]) -> str:
    """The statement is about these files; the commit that it names."""
    (name,) = [name for name in digests if name.endswith(".intoto.json")] or [""]
    if not name:
        raise NotVerified("there is no provenance")
    document = json.loads((folder / name).read_text())
    subjects = {each["name"]: each["digest"]["sha256"] for each in document["subject"]}
    if subjects != {file: digest for file, digest in digests.items() if file != name}:
        raise NotVerified(f"{name} is about other files than these")
    materials = document["predicate"]["buildDefinition"]["resolvedDependencies"]
    return next(str(each["digest"]["gitCommit"]) for each in materials if "gitCommit" in each["digest"])


def main() -> int:
    """The command line: 0 when all holds, 1 when something does not."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release.verify")
    parser.add_argument("folder", type=Path)
    signed = parser.add_mutually_exclusive_group(required=True)
    signed.add_argument("--signers", type=Path, help="whose signature counts: a file of ALLOWED SIGNERS")
    signed.add_argument("--unsigned", action="store_true", help="ask for no signature")
    parser.add_argument("--identity", default="releases", help="the name in that file")
    asked = parser.parse_args()
    try:
        if asked.signers:
            check_signature(asked.folder, asked.signers, asked.identity)
        digests = check_digests(asked.folder)
        commit = check_provenance(asked.folder, digests)
    except (NotVerified, OSError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    print(
        f"{len(digests)} files of commit {commit}: {'UNSIGNED' if asked.unsigned else 'signed'}, digests hold"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
