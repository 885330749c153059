"""Finding the API server and proving who we are: kubeconfig, service account, exec credentials, TLS.

lightkube reads all of these; what it leaves open is closed here.
"""

import json
from pathlib import Path

import httpx2
import msgspec
import yaml
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import NameValue, User, UserExec
from lightkube.core.exceptions import ConfigError

from rackloom.errors import Refused

TIMEOUT = httpx2.Timeout(10.0, read=60.0)
"""Seconds. The server ends a request that is not a watch after 60 (--request-timeout)."""
_EXEC_READ = "client.authentication.k8s.io/v1beta1"
_EXEC_STABLE = "client.authentication.k8s.io/v1"


def http_client(
    kubeconfig: Path | None, context: str | None, *, transport: httpx2.AsyncBaseTransport | None = None
) -> httpx2.AsyncClient:
    """A client that speaks to the API server of a kubeconfig.

    Without a path: the pod's service account, else $KUBECONFIG, else ~/.kube/config. Raises `Refused` where
    none of them serves.
    """
    try:
        config = _config(kubeconfig, context)
        return AsyncClient(config, ConnectionParams(timeout=TIMEOUT, transport=transport))  # type: ignore[arg-type]
    except yaml.YAMLError as error:
        # Without what it says, and without it as the cause: it quotes the line, which may hold a token.
        raise Refused(
            f"no API server from {kubeconfig or 'this environment'}: it is no YAML{_at(error)}",
            nearest_fix="correct the kubeconfig there",
        ) from None
    except (
        AttributeError,
        ConfigError,
        LookupError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        where = kubeconfig or "this environment"
        told = error if isinstance(error, ConfigError | OSError | ValueError) else "it is no kubeconfig"
        fix = "give --kubeconfig a readable file, or run in a pod with a service account"
        raise Refused(f"no API server from {where}: {told}", nearest_fix=fix) from error


def _at(error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"


def _config(kubeconfig: Path | None, context: str | None) -> SingleConfig:
    found = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
    config = found.get(context)
    if config is None:
        raise ConfigError("it names no context")
    user = config.user or User()
    if user.exec:
        user = msgspec.structs.replace(user, exec=_readable(user.exec))
    return config._replace(user=user)


def _readable(command: UserExec) -> UserExec:
    """A credential plugin as lightkube 1.0.1 runs it.

    It knows v1beta1 only, whose answer a v1 plugin's equals, and leaves out KUBERNETES_EXEC_INFO, which v1
    requires (kubernetes.io, client-go credential plugins).
    """
    info = {"apiVersion": command.apiVersion, "kind": "ExecCredential", "spec": {"interactive": False}}
    told = NameValue(name="KUBERNETES_EXEC_INFO", value=json.dumps(info))
    version = _EXEC_READ if command.apiVersion == _EXEC_STABLE else command.apiVersion
    return msgspec.structs.replace(command, apiVersion=version, env=[*(command.env or ()), told])
