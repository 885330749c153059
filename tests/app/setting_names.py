"""Every setting of the site, as the pages must name it."""

from typing import Any

from pydantic import BaseModel

from rackloom.app.config import Config, Section


def setting_names() -> tuple[str, ...]:
    """Every setting by its path, as `nvlink_config.enabled`."""
    return tuple(_setting_paths(Config, ""))


def _setting_paths(model: type[BaseModel], prefix: str) -> list[str]:
    found: list[str] = []
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        found += _setting_paths(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return found


def _section_of(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
