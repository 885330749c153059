"""The configuration of `rackloom serve`: one TOML file, validated completely before anything starts.

Each table of the file is a `Section`, a frozen pydantic model that forbids unknown keys: a misspelt
setting must not silently leave its default in force. Rules that join several keys of a table (TLS
certificate and key, exactly one of two databases, one login for Vault) are validators of its section.
`[nvlink_config]` has the keys of NVIDIA Infra Controller, so that an existing section can be kept; the
other sections are specific to Rackloom.

An environment variable overrides each setting: `RACKLOOM_` and the path with two underscores between its
parts, as in `RACKLOOM_DATABASE__POSTGRESQL`. The environment wins over the file. Durations are written as
`60s`, `10m`, `1h 30m` or `7d`.

`load_config` raises one `Refused` that names the file and every wrong key.
"""

import re
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rackloom.app.process import is_loopback
from rackloom.app.tracing import collector_url_problem
from rackloom.carve.api.auth import CUSTOM_ROLE_NAME, DEFAULT_LIFETIME, Role
from rackloom.carve.api.claim_mapping import (
    DEFAULT_PATTERN,
    ORG_NAME,
    ClaimMapping,
    Grant,
    claim_path,
    make_grant,
)
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.core.partitions.domain import DefaultPartitionPolicy
from rackloom.core.partitions.status_rules import DEFAULT_INTERVAL, valid_seconds
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import decode_toml

# How values are written: durations, addresses, and tables that forbid unknown keys.


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def _parse_duration(value: object) -> object:
    """Parse `60s`, `1h`, `1h 30m`. Values that are no text are left to pydantic."""
    if not isinstance(value, str):
        return value
    parts = _DURATION.findall(value)
    if not parts or _DURATION.sub("", value).strip():
        raise ValueError('write a duration like "60s", "10m", "1h" or "7d"')
    return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))


Duration = Annotated[timedelta, BeforeValidator(_parse_duration), Field(gt=timedelta(0))]
Listen = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}$")]
"""`host:port`."""


class Section(BaseModel):
    """A table of the file, which forbids unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# One section per table of the file.


class CertificateRotation(Section):
    """`[nvlink_config.nmx_c_certificate_rotation]`."""

    enabled: bool = False
    run_interval: Duration = timedelta(hours=1)
    rotate_before_expiry: Duration = timedelta(days=7)
    probe_timeout: Duration = timedelta(seconds=10)


class NvlinkConfig(Section):
    """`[nvlink_config]`: the switch controllers and the reconciler."""

    enabled: bool = False
    monitor_run_interval: Duration = timedelta(seconds=DEFAULT_INTERVAL)
    allow_insecure: bool
    nmx_m_operation_timeout: Duration = timedelta(seconds=10)
    nmx_m_endpoint: str = "localhost"
    nmx_c_tls_ca_cert_path: Path | None = None
    nmx_c_tls_client_cert_path: Path | None = None
    nmx_c_tls_client_key_path: Path | None = None
    nmx_c_tls_authority: str | None = None
    nmx_c_endpoint_port: Annotated[int, Field(ge=1, le=65535)] = 9370
    nmx_c_certificate_rotation: CertificateRotation = CertificateRotation()
    partition_monitor_max_concurrent_groups: Annotated[int, Field(ge=1)] = 16
    domain_discovery_enabled: bool = False
    domain_discovery_operation_timeout: Duration = timedelta(seconds=30)

    @property
    def reading_valid_seconds(self) -> float:
        """The age from which a reading of a switch controller is no evidence of the present."""
        return valid_seconds(self.monitor_run_interval.total_seconds())

    @model_validator(mode="after")
    def _whole_client_identity(self) -> "NvlinkConfig":
        if (self.nmx_c_tls_client_cert_path is None) != (self.nmx_c_tls_client_key_path is None):
            raise ValueError(
                "nmx_c_tls_client_cert_path and nmx_c_tls_client_key_path go together: give both or neither"
            )
        return self


class ServerConfig(Section):
    """`[server]`: the REST service."""

    listen: Listen = "127.0.0.1:8443"
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @model_validator(mode="after")
    def _tls_or_loopback(self) -> "ServerConfig":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if self.tls_cert is None and not is_loopback(self.listen):
            raise ValueError(f"{self.listen} is not loopback, so tls_cert and tls_key are needed")
        return self


class DatabaseConfig(Section):
    """`[database]`: exactly one of a directory for SQLite and a PostgreSQL URL."""

    sqlite: Path | None = None
    postgresql: str | None = Field(default=None, repr=False)

    @model_validator(mode="after")
    def _check_exactly_one(self) -> "DatabaseConfig":
        if (self.sqlite is None) == (self.postgresql is None):
            raise ValueError("give either sqlite (a directory) or postgresql (a URL)")
        return self


class GrantConfig(Section):
    """`[[auth.issuers.grants]]`: roles in organisations, from one claim."""

    claim: str
    pattern: str = DEFAULT_PATTERN
    org: str | None = None
    org_claim: str | None = None
    orgs: dict[str, str] = {}
    role: str | None = None
    roles: dict[str, tuple[str, ...]] = {}

    @property
    def grant(self) -> Grant:
        """The grant. Raises ValueError for one that contradicts itself."""
        return make_grant(**self.model_dump())

    @model_validator(mode="after")
    def _can_be_applied(self) -> "GrantConfig":
        _ = self.grant
        for name in self.roles if self.role is None else (self.role,):
            if name not in set(Role) and not CUSTOM_ROLE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is neither {', '.join(Role)} nor the name of a custom role")
        return self


ClaimValue = StrictStr | StrictBool | StrictInt


ALL_ORGANISATIONS = "*"


class SignInConfig(Section):
    """`[auth.issuers.sign_in]`: the client as which the map signs browsers in at this issuer."""

    client_id: Annotated[str, Field(min_length=1)]
    client_secret_file: Path | None = None
    title: Annotated[str, Field(max_length=60)] | None = None
    scopes: tuple[str, ...] = ("openid",)
    token: Literal["access_token", "id_token"] = "access_token"  # noqa: S105 - a name


class IssuerConfig(Section):
    """`[[auth.issuers]]`: an issuer of bearer tokens, its keys, and how its claims are read."""

    issuer: Annotated[str, Field(min_length=1)]
    audience: str | None = None
    audiences: tuple[str, ...] = ()
    jwks_file: Path | None = None
    jwks_url: str | None = None
    ca_file: Path | None = None
    subject_claim: str = "sub"
    required_claims: dict[str, tuple[ClaimValue, ...]] = {}
    grants: tuple[GrantConfig, ...] = ()
    organisations: tuple[str, ...] | None = None
    algorithms: tuple[Literal["EdDSA", "ES256", "RS256"], ...] = Field(default=("RS256",), min_length=1)
    refresh: Duration = timedelta(minutes=5)
    max_token_lifetime: Duration = timedelta(seconds=DEFAULT_LIFETIME)
    sign_in: SignInConfig | None = None

    @model_validator(mode="after")
    def _addresses_can_be_discovered(self) -> "IssuerConfig":
        if self.sign_in is not None and not _is_plain_https(self.issuer):
            raise ValueError("sign_in needs an issuer https://HOST/PATH: its document has the addresses")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> "IssuerConfig":
        if self.jwks_file is not None and self.jwks_url is not None:
            raise ValueError(
                "give either jwks_file or jwks_url, or neither to discover the keys of the issuer"
            )
        if self.jwks_url is not None and not self.jwks_url.startswith("https://"):
            raise ValueError("jwks_url must be https: who can change the keys can sign any token")
        if self.jwks_file is not None and self.ca_file is not None:
            raise ValueError("ca_file is for keys that are fetched, and jwks_file is read")
        if self.jwks_file is None and self.jwks_url is None and not _is_plain_https(self.issuer):
            raise ValueError(
                "issuer must be https://HOST/PATH to discover its keys: give that, or jwks_file, or jwks_url"
            )
        return self

    @model_validator(mode="after")
    def _can_be_verified(self) -> "IssuerConfig":
        if not all(self.all_audiences) or not self.all_audiences:
            raise ValueError(
                "give audience or audiences: without them tokens for other services would be accepted"
            )
        # It separates issuer and subject in records.
        if "#" in self.issuer:
            raise ValueError("issuer must not contain #")
        _ = self.claim_mapping
        return self

    @property
    def all_audiences(self) -> tuple[str, ...]:
        """A token must be for one of these."""
        return (*(() if self.audience is None else (self.audience,)), *self.audiences)

    @property
    def discovery_url(self) -> str:
        """The address of its discovery document."""
        return f"{self.issuer.removesuffix('/')}/.well-known/openid-configuration"

    @property
    def host(self) -> str:
        """Its host. Empty if the issuer is not an address."""
        return urlsplit(self.issuer).hostname or ""

    @property
    def only_organisation(self) -> str | None:
        """The organisation of all its tokens, or None if there may be several."""
        named = self._own_organisations
        return next(iter(named)) if named is not None and len(named) == 1 else None

    @property
    def claim_mapping(self) -> ClaimMapping:
        """How the claims are read. Raises ValueError for a claim that cannot be named so."""
        return ClaimMapping(
            subject=claim_path(self.subject_claim),
            required={claim_path(name): values for name, values in self.required_claims.items()},
            grants=tuple(grant.grant for grant in self.grants),
            organisations=self._own_organisations,
        )

    @property
    def _own_organisations(self) -> frozenset[str] | None:
        """The only organisations that its tokens may name, in lower case, or None for all."""
        named = self.organisations
        if named is None or named == (ALL_ORGANISATIONS,):
            return None
        if not named or not all(map(ORG_NAME.fullmatch, named)):
            raise ValueError(f'organisations must name some, or be ["{ALL_ORGANISATIONS}"] for all')
        return frozenset(name.lower() for name in named)


def _is_plain_https(url: str) -> bool:
    parts = urlsplit(url)
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    return parts.scheme == "https" and bool(parts.hostname) and is_plain


class AuthConfig(Section):
    """`[auth]`."""

    issuers: tuple[IssuerConfig, ...] = ()
    auto_tenant: bool = False

    @model_validator(mode="after")
    def _each_has_its_own(self) -> "AuthConfig":
        if len(self.issuers) > 1 and any(issuer.organisations is None for issuer in self.issuers):
            raise ValueError(
                "with several issuers each needs organisations, those that its tokens may name"
                f' (["{ALL_ORGANISATIONS}"] for all): else a tenant\'s issuer could name the provider'
            )
        names = Counter(issuer.issuer for issuer in self.issuers)
        for name, times in names.items():
            if times > 1:
                raise ValueError(f"issuer {name} is configured twice: put all that it needs into one section")
        return self


class AdminConfig(Section):
    """`[admin]`: the operator's gRPC, always over mTLS. Without this section it is not served."""

    listen: Listen = "127.0.0.1:1079"
    tls_cert: Path
    tls_key: Path
    client_ca: Path
    admin_names: tuple[str, ...] = ()
    reader_names: tuple[str, ...] = ()


class MetricsConfig(Section):
    """`[metrics]`: /metrics, /healthz and /readyz, in plain HTTP."""

    listen: Listen = "127.0.0.1:9108"
    prefix: Annotated[str, Field(pattern=r"^([a-zA-Z_:][a-zA-Z0-9_:]*)?$")] = "nico_"


class HostStateConfig(Section):
    """`[site.host_state]`: an external provider of host states. An instance is ready only on a ready host."""

    provider: Literal["none", "http"] = "none"
    url: str | None = None
    interval: Duration = timedelta(seconds=10)

    @model_validator(mode="after")
    def _url_with_http(self) -> "HostStateConfig":
        if (self.provider == "http") != (self.url is not None):
            raise ValueError('url goes with provider = "http"')
        return self


class SiteConfig(Section):
    """`[site]`: the name of the site, its provider, and the sources of its machines."""

    name: Annotated[str, Field(min_length=2, max_length=256)]
    provider_org: Annotated[str, Field(min_length=1)]
    default_partition: DefaultPartitionPolicy = DefaultPartitionPolicy.NONE
    machine_sources: tuple[Literal["nmx-c", "nmx-m", "import"], ...] = ("nmx-c", "nmx-m", "import")
    host_state: HostStateConfig = HostStateConfig()


class ClusterConfig(Section):
    """`[kubernetes]`: the cluster on the site's racks, which the map shows."""

    kubeconfig: Path | None = None
    context: str | None = None
    in_cluster: bool = False
    namespace: str = DEFAULT_DAEMON_NAMESPACE

    @model_validator(mode="after")
    def _one_way_in(self) -> "ClusterConfig":
        if self.in_cluster == (self.kubeconfig is not None):
            raise ValueError("give either kubeconfig (a file) or in_cluster = true (a service account)")
        if self.context is not None and self.kubeconfig is None:
            raise ValueError("context is one of a kubeconfig: give kubeconfig too, or leave context out")
        return self


class MapConfig(Section):
    """`[map]`: further contents of the map, and its address for browsers."""

    transfers: Path | None = None
    address: str | None = None
    grafana: str | None = None

    @model_validator(mode="after")
    def _leads_to_a_web_page(self) -> "MapConfig":
        parts = urlsplit(self.grafana or "https://none")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or "@" in parts.netloc:
            raise ValueError("grafana is https://HOST/PATH, as browsers reach it")
        return self

    @model_validator(mode="after")
    def _is_where_browsers_go(self) -> "MapConfig":
        if self.address is not None:
            parts = urlsplit(self.address)
            is_local = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
            if not (is_local or _is_plain_https(self.address)) or parts.path not in ("", "/"):
                raise ValueError("address is https://HOST[:PORT], as browsers reach the map")
        return self


class VaultConfig(Section):
    """`[secrets.vault]`: KV version 2."""

    url: str
    mount: str = "secret"
    token_file: Path | None = None
    kubernetes_role: str | None = None
    service_account_token: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    ca: Path | None = None

    @model_validator(mode="after")
    def _one_login(self) -> "VaultConfig":
        if (self.token_file is None) == (self.kubernetes_role is None):
            raise ValueError("give either token_file or kubernetes_role")
        return self


class KubernetesSecretsConfig(Section):
    """`[secrets.kubernetes]`: Secrets of one namespace, through the API server."""

    url: str = "https://kubernetes.default.svc"
    namespace: str
    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class SecretsConfig(Section):
    """`[secrets]`: where passwords and keys are stored."""

    provider: Literal["file", "environment", "kubernetes", "vault"] = "environment"
    directory: Path | None = None
    kubernetes: KubernetesSecretsConfig | None = None
    vault: VaultConfig | None = None

    @model_validator(mode="after")
    def _what_the_provider_needs(self) -> "SecretsConfig":
        needed = {"file": self.directory, "kubernetes": self.kubernetes, "vault": self.vault}
        if self.provider in needed and needed[self.provider] is None:
            name = "directory" if self.provider == "file" else f"[secrets.{self.provider}]"
            raise ValueError(f'provider = "{self.provider}" needs {name}')
        return self


class TenantLimitsConfig(Section):
    """`[limits.tenant]`: the requests of one organisation, in each process."""

    requests_per_second: Annotated[float, Field(gt=0)] = 50.0
    burst: Annotated[int, Field(ge=1)] = 25
    concurrent: Annotated[int, Field(ge=1)] = 1
    waiting: Annotated[int, Field(ge=1)] = 64


class ProviderLimitsConfig(TenantLimitsConfig):
    """`[limits.provider]`: the requests of the administrators of one provider, in each process."""

    requests_per_second: Annotated[float, Field(gt=0)] = 200.0
    burst: Annotated[int, Field(ge=1)] = 200
    concurrent: Annotated[int, Field(ge=1)] = 16
    waiting: Annotated[int, Field(ge=1)] = 256


class LimitsConfig(Section):
    """`[limits]`: how many requests of an organisation REST serves."""

    tenant: TenantLimitsConfig = TenantLimitsConfig()
    provider: ProviderLimitsConfig = ProviderLimitsConfig()


class AuditConfig(Section):
    """`[audit]`: the time to keep entries of the audit log, and the proxies whose addresses count."""

    retention_days: Annotated[int, Field(ge=1, le=36_500)] = 400
    max_entries: Annotated[int, Field(ge=1_000, le=1_000_000_000)] = 2_000_000
    trusted_proxies: tuple[IPvAnyNetwork, ...] = ()


class TracingConfig(Section):
    """`[tracing]`: the collector of spans. None are sent without `endpoint`."""

    endpoint: str | None = None
    sample_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    ca_file: Path | None = None

    @model_validator(mode="after")
    def _is_collector(self) -> "TracingConfig":
        if self.endpoint is None:
            if self.ca_file is not None:
                raise ValueError("ca_file is for an endpoint: give both or neither")
            return self
        problem = collector_url_problem(self.endpoint)
        if problem is not None:
            raise ValueError(problem)
        return self


class LogConfig(Section):
    """`[log]`."""

    file: Path | None = None


# The whole file.


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
    limits: LimitsConfig = LimitsConfig()
    admin: AdminConfig | None = None
    metrics: MetricsConfig = MetricsConfig()
    secrets: SecretsConfig = SecretsConfig()
    kubernetes: ClusterConfig | None = None
    map: MapConfig = MapConfig()
    audit: AuditConfig = AuditConfig()
    tracing: TracingConfig = TracingConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _providers_know_the_way_back(self) -> "Config":
        if self.map.address is None and any(issuer.sign_in is not None for issuer in self.auth.issuers):
            raise ValueError("auth.issuers.sign_in needs map.address: the provider sends browsers back there")
        return self

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


def load_config(path: Path) -> Config:
    """The configuration in `path`. Raises Refused naming the file and every key that is wrong."""
    try:
        content = decode_toml(path.read_bytes(), str(path))
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}", nearest_fix="name it with --config") from error
    except Undecodable as error:
        raise Refused(f"{path} is not TOML: {error.reason}", nearest_fix="correct that line") from error
    try:
        return Config(**content)
    except ValidationError as error:
        message = "; ".join(
            _problem_text(problem) for problem in error.errors(include_input=False, include_url=False)
        )
        raise Refused(
            f"{path}: {message}", nearest_fix="see docs/operating.md, which names every setting"
        ) from None


def _problem_text(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    return f"{key}: {problem['msg'].removeprefix('Value error, ')}"
