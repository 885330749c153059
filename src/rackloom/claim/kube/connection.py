"""Finding the API server and authenticating: kubeconfig, service account, exec plugins, TLS.

lightkube reads all of these. This module adds a time limit for credential plugins, the
`KUBERNETES_EXEC_INFO` that their v1 protocol requires, and errors that name the remedy without a kubeconfig
line, which may hold a token.
"""

import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import yaml
from lightkube.config.client_adapter import AsyncClient, ConnectionParams, ExecAuth
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User, UserExec
from lightkube.core.exceptions import ConfigError

from rackloom.errors import Refused, Retry
from rackloom.runtime import programs
from rackloom.runtime.foreign_text import decode_json
from rackloom.serving.loopback import is_this_host

TIMEOUT = httpx2.Timeout(10.0, read=60.0)
"""Seconds. The server ends a request that is not a watch after 60 (--request-timeout)."""
EXEC_TIMEOUT_SECONDS = 30.0
"""Time limit of a credential plugin: lightkube would wait for it forever, and its caller, too."""
_EXEC_VERSIONS = [f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1")]
"""They answer alike (kubernetes.io, client-go credential plugins)."""


def http_client(
    kubeconfig: Path | None, context: str | None, *, transport: httpx2.AsyncBaseTransport | None = None
) -> httpx2.AsyncClient:
    """A client that speaks to the API server of a kubeconfig.

    Without a path: the pod's service account, else $KUBECONFIG, else ~/.kube/config. Raises `Refused` where
    none of them serves.
    """
    try:
        config = _chosen_config(kubeconfig, context)
        return _configured_client(config, transport)
    except yaml.YAMLError as error:
        # Neither its text nor its chain is kept: it quotes the line, which may hold a token.
        raise Refused(
            f"no API server from {kubeconfig or 'this environment'}: it is no YAML{_position(error)}",
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
        why = error if isinstance(error, ConfigError | OSError | ValueError) else "it is no kubeconfig"
        fix = (
            "give --kubeconfig a readable file, or run in a pod with a service account"
            if context is None
            else "give --kubeconfig a readable file, and --context one of its contexts"
        )
        raise Refused(f"no API server from {where}: {why}", nearest_fix=fix) from error


def _configured_client(
    config: SingleConfig, transport: httpx2.AsyncBaseTransport | None
) -> httpx2.AsyncClient:
    proxied = not is_this_host(urlsplit(config.cluster.server).hostname or "")
    client = AsyncClient(config, ConnectionParams(timeout=TIMEOUT, transport=transport, trust_env=proxied))  # type: ignore[arg-type]
    command = config.user.exec if config.user else None
    if isinstance(client.auth, ExecAuth) and command is not None:
        client.auth = ExecCredentialAuth(command)
    return client


class ExecCredentialAuth(httpx2.Auth):
    """The bearer token of a credential plugin, which runs again after a 401. Raises ConfigError."""

    def __init__(self, command: UserExec) -> None:
        if command.apiVersion not in _EXEC_VERSIONS:
            raise ConfigError(f"credential plugins that speak {command.apiVersion} are not known")
        self._command = (command.command, *(command.args or ()))
        # Which v1 requires and lightkube 1.0.1 leaves out.
        info = {"apiVersion": command.apiVersion, "kind": "ExecCredential", "spec": {"interactive": False}}
        self._env = {variable.name: variable.value for variable in command.env or ()} | {
            "KUBERNETES_EXEC_INFO": json.dumps(info)
        }
        self._token: str | None = None

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Send the request with a token."""
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
            response = yield request
            if response.status_code != 401:
                return
        self._token = await self._ask()
        request.headers["Authorization"] = f"Bearer {self._token}"
        yield request

    async def _ask(self) -> str:
        name = self._command[0]
        try:
            ended = await programs.run_program(
                *self._command, seconds=EXEC_TIMEOUT_SECONDS, again=0.0, env={**os.environ, **self._env}
            )
        except Retry as error:
            raise ConfigError(f"credential plugin: {error.reason}") from error
        if ended.code:
            complaint = ended.stderr.decode(errors="replace")
            raise ConfigError(f"credential plugin {name} ended with {ended.code}: {complaint}")
        return str(decode_json(ended.stdout, name)["status"]["token"])


def _position(error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"


def _chosen_config(kubeconfig: Path | None, context: str | None) -> SingleConfig:
    found = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
    config = found.get(context)
    if config is None:
        raise ConfigError("it names no context")
    return config._replace(user=config.user or User())
