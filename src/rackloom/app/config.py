"""The configuration of `rackloom serve`: one TOML file, checked whole before anything starts.

`[nvlink_config]` has the keys of NVIDIA Infra Controller, so that a site keeps its section; the other
sections are ours. A key that nobody knows is an error: a misspelt setting must not pass for its default.
Every setting can be overridden by an environment variable, `RACKLOOM_` and the path with two underscores:
`RACKLOOM_DATABASE__POSTGRESQL`.
"""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rackloom.app.config_sections import (
    AdminConfig,
    AuthConfig,
    ClusterConfig,
    DatabaseConfig,
    LogConfig,
    MapConfig,
    MetricsConfig,
    NvlinkConfig,
    SecretsConfig,
    ServerConfig,
    SiteConfig,
)
from rackloom.app.config_values import Section
from rackloom.errors import Refused


class Config(BaseSettings):
    """The whole file."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="RACKLOOM_", env_nested_delimiter="__"
    )

    site: SiteConfig
    database: DatabaseConfig
    nvlink_config: NvlinkConfig
    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    admin: AdminConfig | None = None
    metrics: MetricsConfig = MetricsConfig()
    secrets: SecretsConfig = SecretsConfig()
    kubernetes: ClusterConfig | None = None
    map: MapConfig = MapConfig()
    log: LogConfig = LogConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over the file."""
        return env_settings, init_settings


def load(path: Path) -> Config:
    """The configuration in `path`. Raises Refused naming the file and every key that is wrong."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}", nearest_fix="name it with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path} is not TOML: {error}", nearest_fix="correct that line") from error
    try:
        return Config(**content)
    except ValidationError as error:
        told = "; ".join(_told(one) for one in error.errors(include_input=False, include_url=False))
        raise Refused(
            f"{path}: {told}", nearest_fix="see docs/operating.md, which names every setting"
        ) from None


def settings() -> tuple[str, ...]:
    """Every setting by its path, as `nvlink_config.enabled`."""
    return tuple(_paths(Config, ""))


def _paths(model: type[BaseModel], prefix: str) -> list[str]:
    found: list[str] = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        found += _paths(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return found


def _section(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _told(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {problem['msg'].removeprefix('Value error, ')}"
