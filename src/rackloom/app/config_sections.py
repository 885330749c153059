"""The tables of the configuration, and what must hold within each."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rackloom.app.config_values import Duration, Listen, Section, is_loopback
from rackloom.carve.plan.values import DefaultPartition
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE


class CertificateRotation(Section):
    """`[nvlink_config.nmx_c_certificate_rotation]`."""

    enabled: bool = False
    run_interval: Duration = timedelta(hours=1)
    rotate_before_expiry: Duration = timedelta(days=7)
    probe_timeout: Duration = timedelta(seconds=10)


class NvlinkConfig(Section):
    """`[nvlink_config]`: the switch controllers and the reconciler."""

    enabled: bool = False
    monitor_run_interval: Duration = timedelta(seconds=60)
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
    def _one(self) -> "DatabaseConfig":
        if (self.sqlite is None) == (self.postgresql is None):
            raise ValueError("give either sqlite (a directory) or postgresql (a URL)")
        return self


class Issuer(Section):
    """`[[auth.issuers]]`: who may sign bearer tokens, with which keys."""

    issuer: str
    audience: str
    jwks_file: Path | None = None
    jwks_url: str | None = None
    algorithms: tuple[Literal["EdDSA", "ES256", "RS256"], ...] = Field(default=("RS256",), min_length=1)
    refresh: Duration = timedelta(minutes=5)

    @model_validator(mode="after")
    def _one_source(self) -> "Issuer":
        if (self.jwks_file is None) == (self.jwks_url is None):
            raise ValueError("give either jwks_file or jwks_url")
        if self.jwks_url is not None and not self.jwks_url.startswith("https://"):
            raise ValueError("jwks_url must be https: who can change the keys can sign any token")
        return self


class AuthConfig(Section):
    """`[auth]`."""

    issuers: tuple[Issuer, ...] = ()
    auto_tenant: bool = False


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


class HostState(Section):
    """`[site.host_state]`: who else must say that a host is ready before its instance is."""

    provider: Literal["none", "http"] = "none"
    url: str | None = None
    interval: Duration = timedelta(seconds=10)

    @model_validator(mode="after")
    def _url_with_http(self) -> "HostState":
        if (self.provider == "http") != (self.url is not None):
            raise ValueError('url goes with provider = "http"')
        return self


class SiteConfig(Section):
    """`[site]`: what the site is called and where its machines come from."""

    name: Annotated[str, Field(min_length=2, max_length=256)]
    provider_org: Annotated[str, Field(min_length=1)]
    default_partition: DefaultPartition = DefaultPartition.NONE
    machine_sources: tuple[Literal["nmx-c", "nmx-m", "import"], ...] = ("nmx-c", "nmx-m", "import")
    host_state: HostState = HostState()


class ClusterConfig(Section):
    """`[kubernetes]`: the cluster on the site's racks, which the map draws."""

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
    """`[map]`: what the map draws beside records and cluster."""

    transfers: Path | None = None


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
    """`[secrets]`: where passwords and keys lie."""

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


class LogConfig(Section):
    """`[log]`."""

    file: Path | None = None
