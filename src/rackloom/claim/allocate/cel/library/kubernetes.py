"""Quantities and versions, and the authorizer's functions, which exist but have nothing to be called on."""

from rackloom.claim.allocate.cel.errors import EvaluationError
from rackloom.claim.allocate.cel.overloads import Library, as_error, unavailable
from rackloom.claim.allocate.cel.values import DerivedQuantity
from rackloom.claim.allocate.quantity import DECIMAL_EXPONENT, Quantity
from rackloom.claim.allocate.semver import Semver

KUBERNETES = Library()
_add = KUBERNETES.add


@_add("string_to_quantity", "quantity(string) -> quantity")
def _quantity(text: str) -> Quantity:
    try:
        return Quantity.parse(text)
    except ValueError as error:
        raise as_error(error) from None


@_add("is_quantity_string", "isQuantity(string) -> bool")
def _is_quantity(text: str) -> bool:
    try:
        Quantity.parse(text)
    except ValueError:
        return False
    return True


@_add("quantity_sign", "sign(quantity) -> int")
def _sign(one: Quantity) -> int:
    return one.sign()


@_add("quantity_is_greater_than", "quantity.isGreaterThan(quantity) -> bool")
@_add("semver_is_greater_than", "semver.isGreaterThan(semver) -> bool")
def _is_greater(one: Quantity | Semver, two: Quantity | Semver) -> bool:
    return one.compare(two) > 0  # type: ignore[arg-type]


@_add("quantity_is_less_than", "quantity.isLessThan(quantity) -> bool")
@_add("semver_is_less_than", "semver.isLessThan(semver) -> bool")
def _is_less(one: Quantity | Semver, two: Quantity | Semver) -> bool:
    return one.compare(two) < 0  # type: ignore[arg-type]


@_add("quantity_compare_to", "quantity.compareTo(quantity) -> int")
@_add("semver_compare_to", "semver.compareTo(semver) -> int")
def _compare(one: Quantity | Semver, two: Quantity | Semver) -> int:
    return one.compare(two)  # type: ignore[arg-type]


@_add("quantity_get_float", "quantity.asApproximateFloat() -> double")
def _as_float(one: Quantity) -> float:
    return one.as_float()


@_add("quantity_get_int", "quantity.asInteger() -> int")
def _as_integer(one: Quantity) -> int:
    try:
        return one.as_integer()
    except ValueError as error:
        raise as_error(error) from None


@_add("quantity_is_integer", "quantity.isInteger() -> bool")
def _is_integer(one: Quantity) -> bool:
    return one.is_integer()


def _derived(one: Quantity) -> DerivedQuantity:
    return DerivedQuantity(one.unscaled, one.scale, one.format, one.unbounded)


@_add("quantity_add", "quantity.add(quantity) -> quantity")
def _plus(one: Quantity, two: Quantity) -> Quantity:
    return _derived(one + two)


@_add("quantity_add_int", "quantity.add(int) -> quantity")
def _plus_int(one: Quantity, two: int) -> Quantity:
    return _derived(one + Quantity(two, 0, DECIMAL_EXPONENT))


@_add("quantity_sub", "quantity.sub(quantity) -> quantity")
def _minus(one: Quantity, two: Quantity) -> Quantity:
    return _derived(one - two)


@_add("quantity_sub_int", "quantity.sub(int) -> quantity")
def _minus_int(one: Quantity, two: int) -> Quantity:
    return _derived(one - Quantity(two, 0, DECIMAL_EXPONENT))


@_add("string_to_semver", "semver(string) -> semver")
def _semver(text: str) -> Semver:
    return _semver_normalised(text, False)


@_add("string_bool_to_semver", "semver(string, bool) -> semver")
def _semver_normalised(text: str, normalise: bool) -> Semver:
    try:
        return Semver.normalise(text) if normalise else Semver.parse(text)
    except ValueError as error:
        raise as_error(error) from None


@_add("is_semver_string", "isSemver(string) -> bool")
def _is_semver(text: str) -> bool:
    return _is_semver_normalised(text, False)


@_add("is_semver_string_bool", "isSemver(string, bool) -> bool")
def _is_semver_normalised(text: str, normalise: bool) -> bool:
    try:
        _semver_normalised(text, normalise)
    except EvaluationError:
        return False
    return True


@_add("semver_major", "semver.major() -> int")
def _major(version: Semver) -> int:
    return _signed(version.major)


@_add("semver_minor", "semver.minor() -> int")
def _minor(version: Semver) -> int:
    return _signed(version.minor)


@_add("semver_patch", "semver.patch() -> int")
def _patch(version: Semver) -> int:
    return _signed(version.patch)


def _signed(number: int) -> int:
    """Upstream reinterprets the unsigned number as a signed one."""
    return number - 2**64 if number >= 2**63 else number


for _id, _signature in (
    ("authorizer_path", "authorizer.path(string) -> path_check"),
    ("pathcheck_check", "path_check.check(string) -> decision"),
    ("authorizer_group", "authorizer.group(string) -> group_check"),
    ("authorizer_serviceaccount", "authorizer.serviceAccount(string, string) -> authorizer"),
    ("groupcheck_resource", "group_check.resource(string) -> resource_check"),
    ("resourcecheck_subresource", "resource_check.subresource(string) -> resource_check"),
    ("resourcecheck_namespace", "resource_check.namespace(string) -> resource_check"),
    ("resourcecheck_name", "resource_check.name(string) -> resource_check"),
    ("resourcecheck_check", "resource_check.check(string) -> decision"),
    ("authorizer_fieldselector", "resource_check.fieldSelector(string) -> resource_check"),
    ("authorizer_labelselector", "resource_check.labelSelector(string) -> resource_check"),
    ("decision_allowed", "decision.allowed() -> bool"),
    ("decision_reason", "decision.reason() -> string"),
    ("decision_error", "decision.error() -> string"),
    ("decision_errored", "decision.errored() -> bool"),
):
    _add(_id, _signature)(unavailable)
