"""The custom resources of the controller, from the definitions that `deploy/kubernetes/base` installs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from docs.site.reference.markdown import cell, code, made_from, table

BASE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "base"
FILES = ("crds.yaml", "crd-gangs.yaml")


def definitions() -> Iterator[dict[str, Any]]:
    """Every CustomResourceDefinition that is installed."""
    for name in FILES:
        yield from yaml.safe_load_all((BASE / name).read_text())


def page() -> str:
    """Every version of every resource, with all fields."""
    parts = ["# Custom resources", made_from("the CustomResourceDefinitions of `deploy/kubernetes/base`")]
    for definition in definitions():
        spec = definition["spec"]
        names = spec["names"]
        short = ", ".join(map(code, names.get("shortNames", ())))
        for version in spec["versions"]:
            parts += [
                f"## {names['kind']}",
                f"`{spec['group']}/{version['name']}`, {spec['scope'].lower()}; "
                f"`kubectl get {names['plural']}`" + (f", short {short}." if short else "."),
                table(
                    ("field", "type", "", "rules", "meaning"),
                    fields(version["schema"]["openAPIV3Schema"], ""),
                ),
            ]
    return "\n\n".join(parts) + "\n"


def fields(schema: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Every field below a schema: path, type, whether it is required, what restricts it, what it means."""
    needed = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        if not prefix and name in ("apiVersion", "kind", "metadata"):
            continue
        path = f"{prefix}{name}"
        yield (
            code(path),
            cell(_type(field)),
            "required" if name in needed else "",
            cell(_rules(field)),
            cell(field.get("description", "")),
        )
        inner = field.get("items", field)
        yield from fields(inner, f"{path}[]." if "items" in field else f"{path}.")
        if isinstance(more := field.get("additionalProperties"), Mapping):
            yield from fields(more, f"{path}.*.")


def _type(field: Mapping[str, Any]) -> str:
    if field.get("x-kubernetes-preserve-unknown-fields"):
        return "any"
    if "items" in field:
        return f"list of {_type(field['items'])}"
    return str(field.get("type", "any"))


def _rules(field: Mapping[str, Any]) -> str:
    found = []
    if "enum" in field:
        found.append(" or ".join(map(code, field["enum"])))
    if "default" in field:
        found.append(f"default {code(field['default'])}")
    limits = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "format")
    found += [f"{key} {code(field[key])}" for key in limits if key in field]
    found += [rule.get("message", rule["rule"]) for rule in field.get("x-kubernetes-validations", ())]
    return "; ".join(found)
