"""What is sent with a delete, and to the subresources of pods: DeleteOptions, Binding, Eviction."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rackloom.twin.kube import answers

_SECONDS = 2**31 - 1
Propagation = Literal["Background", "Foreground", "Orphan"]


class _Identity(msgspec.Struct, frozen=True, rename="camel"):
    uid: str | None = None
    resource_version: str | None = None


class _Target(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]


class DeleteOptions(msgspec.Struct, frozen=True, rename="camel"):
    """How an object goes; `preconditions`: only if it is that one. `grace_period_seconds`: None, its own."""

    preconditions: _Identity | None = None
    dry_run: list[str] | None = None
    grace_period_seconds: Annotated[int, msgspec.Meta(ge=-_SECONDS, le=_SECONDS)] | None = None
    propagation_policy: Propagation | None = None

    @property
    def meant(self) -> _Identity:
        """Which object: of any uid and version where it is not said."""
        return self.preconditions or _Identity()


class Binding(msgspec.Struct, frozen=True):
    """A pod's node; `metadata.uid`: of just that pod."""

    target: _Target
    metadata: _Identity | None = None


class Eviction(msgspec.Struct, frozen=True, rename="camel"):
    """A delete that a disruption budget may refuse."""

    delete_options: DeleteOptions | None = None


_Asked = TypeVar("_Asked", DeleteOptions, Binding, Eviction)


def read_as(what: type[_Asked], body: Any) -> _Asked:
    """The body of a request; one that is empty says nothing. Raises `Rejected` (400)."""
    try:
        return msgspec.convert({} if body is None else body, what)
    except msgspec.ValidationError as error:
        raise answers.bad_request(f"the body of the request is no {what.__name__}: {error}") from error
