"""The provider that the configuration names."""

import os

from rackloom.app.config_sections import SecretsConfig, VaultConfig
from rackloom.app.secrets.environment import EnvironmentSecrets
from rackloom.app.secrets.files import FileSecrets
from rackloom.app.secrets.values import SecretProvider


def provider_of(config: SecretsConfig) -> SecretProvider:
    """The one provider of this site. A client library is imported only where it is used."""
    if config.provider == "file" and config.directory is not None:
        return FileSecrets(config.directory)
    if config.kubernetes is not None and config.provider == "kubernetes":
        from rackloom.app.secrets.kubernetes import KubernetesSecrets

        there = config.kubernetes
        return KubernetesSecrets(there.url, there.namespace, there.service_account)
    if config.vault is not None and config.provider == "vault":
        return _vault(config.vault)
    return EnvironmentSecrets(os.environ)


def _vault(config: VaultConfig) -> SecretProvider:
    from rackloom.app.secrets import vault

    login = (
        vault.token_from(config.token_file)
        if config.token_file is not None
        else vault.kubernetes_role(config.kubernetes_role or "", config.service_account_token)
    )
    return vault.VaultSecrets(config.url, config.mount, login, config.ca)
