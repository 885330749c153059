"""The refusals of an API server, with the status codes, reasons and words of a real one.

The wording is that of k8s.io/apimachinery's errors as clients see them. The contract suite compares it
with a real server. Each function returns the error, and the caller raises it.
"""

from rackloom.claim.kube.api import Conflict, Expired, KubeError, NotFound, Rejected
from rackloom.core.cluster.objects import ResourceKind


def resource_name(kind: ResourceKind) -> str:
    """How messages name a resource type: `pods`, `computedomains.resource.nvidia.com`."""
    return f"{kind.plural}.{kind.group}" if kind.group else kind.plural


def _kind_name(kind: ResourceKind) -> str:
    return f"{kind.kind}.{kind.group}" if kind.group else kind.kind


def not_found(kind: ResourceKind, name: str) -> NotFound:
    """There is no such object."""
    return NotFound(404, "NotFound", f'{resource_name(kind)} "{name}" not found')


def not_served() -> NotFound:
    """There is no such resource type."""
    return NotFound(404, "NotFound", "the server could not find the requested resource")


def already_exists(kind: ResourceKind, name: str) -> Conflict:
    """The name is taken."""
    return Conflict(409, "AlreadyExists", f'{resource_name(kind)} "{name}" already exists')


def stale_version(kind: ResourceKind, name: str) -> Conflict:
    """The object is no longer the one that was read."""
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return _operation_conflict(resource_name(kind), name, why)


def uid_conflict(kind: ResourceKind, name: str, wanted: str, found: str) -> Conflict:
    """A write named another uid than the object has."""
    why = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {found}"
    return _operation_conflict(resource_name(kind), name, why)


def precondition_failed(kind: ResourceKind, name: str, what: str, wanted: str, found: str) -> Conflict:
    """A delete named another `what` (UID, ResourceVersion) than the object has."""
    fate = "deleted and then recreated" if what == "UID" else "modified"
    why = f"the {what} in the precondition ({wanted}) does not match the {what} in record ({found})"
    return _operation_conflict(_kind_name(kind), name, f"{why}. The object might have been {fate}")


def binding_conflict(name: str, why: str) -> Conflict:
    """A pod that cannot be bound to a node."""
    return _operation_conflict("pods/binding", name, why)


def _operation_conflict(what: str, name: str, why: str) -> Conflict:
    return Conflict(409, "Conflict", f'Operation cannot be fulfilled on {what} "{name}": {why}')


def apply_conflict(conflicts: list[tuple[str, str]]) -> Conflict:
    """Server-side apply of fields that others own: (owner, field) of each."""
    count = f"{len(conflicts)} conflict" + ("s" if len(conflicts) > 1 else "")
    owners = dict.fromkeys(owner for owner, _ in conflicts)
    if len(conflicts) == 1:
        details = f"conflict with {conflicts[0][0]}: {conflicts[0][1]}"
    else:
        details = "\n".join(
            _owner_lines(owner, [f for who, f in conflicts if who == owner]) for owner in owners
        )
    return Conflict(409, "Conflict", f"Apply failed with {count}: {details}")


def _owner_lines(owner: str, fields: list[str]) -> str:
    return "\n".join([f"conflicts with {owner}:", *(f"- {field}" for field in fields)])


def invalid(kind: ResourceKind, name: str, *problems: str) -> Rejected:
    """A value that the type does not allow: `problems` read `spec.x: Required value`."""
    text = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
    return Rejected(422, "Invalid", f'{_kind_name(kind)} "{name}" is invalid: {text}')


def bad_request(message: str) -> Rejected:
    """The request itself is wrong."""
    return Rejected(400, "BadRequest", message)


def too_large(message: str) -> KubeError:
    """More than a server reads."""
    return KubeError(413, "RequestEntityTooLarge", message)


def forbidden(kind: ResourceKind, name: str, why: str) -> Rejected:
    """An admission plugin, or the user's rights, do not allow it."""
    return Rejected(403, "Forbidden", f'{resource_name(kind)} "{name}" is forbidden: {why}')


def watch_expired(asked: int, oldest: int) -> Expired:
    """A watch or a continued list from a version that is no longer kept."""
    return Expired(410, "Expired", f"too old resource version: {asked} ({oldest})")


def continuation_expired() -> Expired:
    """The next chunk of a list that was begun too long ago."""
    message = "The provided continue parameter is too old to display a consistent list result."
    return Expired(410, "Expired", message)


def list_expired() -> Expired:
    """A list of a version that is no longer kept."""
    return Expired(410, "Expired", "The resourceVersion for the provided list is too old.")


def unreadable_version(version: str) -> Rejected:
    """A resourceVersion that is no number."""
    parsing = f'strconv.ParseUint: parsing "{version}": invalid syntax'
    problem = f'resourceVersion: Invalid value: "{version}": {parsing}'
    return bad_request(f"invalid resource version: {problem}")


def from_the_future(asked: int, current: int) -> KubeError:
    """A version that this server has not reached."""
    message = f"Timeout: Too large resource version: {asked}, current: {current}"
    return KubeError(504, "Timeout", message, retry_after=1.0)
