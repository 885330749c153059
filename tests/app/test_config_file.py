"""The configuration file: read whole, refused with the name of the wrong setting, documented whole."""

from datetime import timedelta
from pathlib import Path

import pytest
from tests.app.setting_names import setting_names

from rackloom.app.config import load_config
from rackloom.errors import Refused

LEAST = """
[site]
name = "lab"
provider_org = "acme"
[database]
sqlite = "/var/lib/rackloom"
[nvlink_config]
allow_insecure = false
"""
UPSTREAM = """
enabled = true
monitor_run_interval = "45s"
nmx_m_operation_timeout = "10s"
nmx_m_endpoint = "localhost"
nmx_c_tls_ca_cert_path = "/etc/ca"
nmx_c_tls_client_cert_path = "/etc/crt"
nmx_c_tls_client_key_path = "/etc/key"
nmx_c_tls_authority = "nmx-c"
nmx_c_endpoint_port = 9371
partition_monitor_max_concurrent_groups = 8
domain_discovery_enabled = true
domain_discovery_operation_timeout = "20s"
[nvlink_config.nmx_c_certificate_rotation]
enabled = false
run_interval = "1h"
rotate_before_expiry = "7d"
probe_timeout = "10s"
"""

ISSUER = "[[auth.issuers]]\nissuer = 'https://i'\naudience = 'a'\n"
SIGN_IN = "[auth.issuers.sign_in]\nclient_id = 'map'\n"
GRANT = f"{ISSUER}[[auth.issuers.grants]]\nclaim = 'groups'\n"


@pytest.fixture
def written(tmp_path):
    def write(text):
        file = tmp_path / "site.toml"
        file.write_text(text)
        return file

    return write


@pytest.fixture
def refused(written):
    def reason(text):
        file = written(text)
        with pytest.raises(Refused) as caught:
            load_config(file)
        assert str(file) in caught.value.reason
        return caught.value.reason

    return reason


def test_the_least_that_a_file_must_say(written):
    config = load_config(written(LEAST))
    assert config.nvlink_config.enabled is False
    assert config.nvlink_config.monitor_run_interval == timedelta(seconds=60)
    assert config.metrics.prefix == "nico_"
    assert config.admin is None


def test_upstreams_section_is_read_as_it_is(written):
    nvlink = load_config(written(LEAST + UPSTREAM)).nvlink_config
    assert nvlink.monitor_run_interval == timedelta(seconds=45)
    assert nvlink.nmx_c_certificate_rotation.rotate_before_expiry == timedelta(days=7)
    assert (nvlink.nmx_c_endpoint_port, nvlink.partition_monitor_max_concurrent_groups) == (9371, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[nvlink_confg]\na = 1", "unknown key nvlink_confg"),
        ("[server]\nlisten_on = 'x'", "unknown key server.listen_on"),
        ("[nvlink_config.nmx_c_certificate_rotation]\nevery = '1h'", "nmx_c_certificate_rotation.every"),
        ("[server]\nlisten = '0.0.0.0:443'", "not loopback"),
        ("[server]\nlisten = 'nowhere'", "server.listen"),
        ("[server]\ntls_cert = '/x'", "go together"),
        ("[secrets]\nprovider = 'vault'", "needs [secrets.vault]"),
        ("[secrets]\nprovider = 'file'", "needs directory"),
        ("[admin]\nlisten = '127.0.0.1:1'", "admin.tls_cert is missing"),
        ("[[auth.issuers]]\nissuer = 'i'\naudience = 'a'", "issuer must be https://HOST/PATH"),
        ("[[auth.issuers]]\nissuer = 'http://localhost'\naudience = 'a'", "issuer must be https://HOST/PATH"),
        ("[[auth.issuers]]\nissuer = 'https://u:p@i'\naudience = 'a'", "issuer must be https://HOST/PATH"),
        (ISSUER + "jwks_file = '/k'\njwks_url = 'https://k'", "either jwks_file or jwks_url"),
        (ISSUER + "jwks_file = '/k'\nca_file = '/c'", "ca_file is for keys that are fetched"),
        (ISSUER.replace("audience = 'a'", ""), "give audience or audiences"),
        (ISSUER.replace("'a'", "''"), "give audience or audiences"),
        (ISSUER.replace("https://i", "https://i#b") + "jwks_file = '/k'", "must not contain #"),
        (ISSUER + "algorithms = ['HS256']", "auth.issuers.0.algorithms.0"),
        (ISSUER + "organisations = []", "organisations must name some"),
        (ISSUER + "organisations = ['*', 'acme']", "organisations must name some"),
        ((ISSUER + "organisations = ['*']\n") * 2, "is configured twice"),
        (ISSUER + "organisations = ['*']\n" + ISSUER, "with several issuers each needs organisations"),
        (ISSUER + "subject_claim = 'a..b'", "'a..b' is no claim"),
        (ISSUER + "required_claims = { '' = [] }", "'' is no claim"),
        (GRANT, "give one of org, org_claim, and {org} in the pattern"),
        (GRANT + "org = 'a'\norg_claim = 'b'", "give one of org, org_claim, and {org} in the pattern"),
        (GRANT + "org = 'a'\nrole = 'TENANT_ADMIN'", "give either role or {role} in the pattern"),
        (GRANT + "pattern = '{org}'\nrole = 'X'", "'X' is neither TENANT_ADMIN"),
        (GRANT + "org = 'a'\nroles = { TENANT_ADMN = ['x'] }", "'TENANT_ADMN' is neither TENANT_ADMIN"),
        (GRANT + "org = 'a b'", "'a b' is no name of an organisation"),
        (GRANT + "org_claim = 'b'\norgs = { x = '' }", "'' is no name of an organisation"),
        (GRANT + "org = 'a'\norgs = { x = 'y' }", "orgs translates names in the token, but org is fixed"),
        (GRANT + "pattern = '{org}-{role}-{tier}'", "use {org} and {role}"),
        (GRANT + "pattern = '{org}/{org}/{role}'", "use {org} and {role}"),
        (GRANT + "pattern = '{org}_{role}'", "put a character that is in no name between {org} and {role}"),
        (GRANT + "pattern = '{org}{role}'", "put a character that is in no name between {org} and {role}"),
        (GRANT + "patern = '{org}/{role}'", "unknown key auth.issuers.0.grants.0.patern"),
        ("[[auth.issuers]]\nissuer = 'i'\naudience = 'a'\njwks_url = 'http://x'", "must be https"),
        ("[site.host_state]\nprovider = 'http'", "url goes with"),
        ("[metrics]\nprefix = 'a-b'", "metrics.prefix"),
        ("[kubernetes]", "kubernetes: give either kubeconfig"),
        ("[kubernetes]\nkubeconfig = '/x'\nin_cluster = true", "kubernetes: give either kubeconfig"),
        ("[kubernetes]\nin_cluster = true\ncontext = 'a'", "kubernetes: context is one of a kubeconfig"),
        ("[kubernetes]\nnamespaces = 'a'", "unknown key kubernetes.namespaces"),
        ("[map]\ntransfer = '/x'", "unknown key map.transfer"),
        ("[map]\naddress = 'http://racks.example.com'", "address is https://HOST[:PORT]"),
        ("[map]\naddress = 'https://racks.example.com/map'", "address is https://HOST[:PORT]"),
        ("[map]\ngrafana = 'javascript:alert(1)'", "grafana is https://HOST/PATH"),
        ("[map]\ngrafana = 'https://user:word@grafana'", "grafana is https://HOST/PATH"),
        (ISSUER + SIGN_IN, "needs map.address"),
        (ISSUER.replace("https://i", "i") + "jwks_file = '/k'\n" + SIGN_IN, "sign_in needs an issuer https"),
        (ISSUER + SIGN_IN + "token = 'refresh_token'", "auth.issuers.0.sign_in.token"),
    ],
)
def test_what_is_wrong_is_named(refused, text, message):
    assert message in refused(LEAST + text)


@pytest.mark.parametrize("text", ["a = ", "[site", "\x00"])
def test_what_is_not_toml_is_refused(refused, text):
    assert "is not TOML" in refused(text)


@pytest.mark.parametrize("duration", ["60", "1 hour", "s", "", "0s", "-1s"])
def test_durations_have_units(refused, duration):
    assert "monitor_run_interval" in refused(LEAST + f'monitor_run_interval = "{duration}"')


def test_allow_insecure_has_no_default(refused):
    text = LEAST.replace("allow_insecure = false", "")
    assert "nvlink_config.allow_insecure is missing" in refused(text)


def test_exactly_one_database(refused):
    assert "either sqlite" in refused(LEAST.replace('sqlite = "/var/lib/rackloom"', ""))


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(Refused, match="No such file"):
        load_config(tmp_path / "none.toml")


def test_the_environment_wins_and_keeps_passwords_out_of_the_file(written, monkeypatch):
    monkeypatch.setenv("RACKLOOM_DATABASE__POSTGRESQL", "postgresql://u:hush@db/site")
    config = load_config(written(LEAST.replace('sqlite = "/var/lib/rackloom"', "")))
    assert config.database.postgresql == "postgresql://u:hush@db/site"
    assert "hush" not in repr(config)


def test_every_setting_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    missing = [setting for setting in setting_names() if f"| `{setting}` |" not in page]
    assert missing == []
    assert len(setting_names()) > 50


def test_no_setting_is_documented_that_does_not_exist():
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    table = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    sections = {setting.partition(".")[0] for setting in setting_names()}
    documented = {name for name in table if "." in name and name.partition(".")[0] in sections}
    assert documented == set(setting_names())


def test_traces_are_off_unless_a_collector_is_named(written):
    assert load_config(written(LEAST)).tracing.endpoint is None
    tracing = load_config(written(LEAST + "[tracing]\nendpoint = 'http://collector:4318'\n")).tracing
    assert (tracing.endpoint, tracing.sample_ratio) == ("http://collector:4318", 1.0)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("endpoint = 'collector:4318'", "no URL of a collector"),
        ("endpoint = 'http://user:hunter2@collector'", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("ca_file = '/etc/ca'", "give both or neither"),
        ("endpoint = 'http://collector'\nsample_ratio = 1.5", "sample_ratio"),
        ("endpoint = 'http://collector'\nratio = 1", "unknown key tracing.ratio"),
    ],
)
def test_traces_to_no_collector_are_refused(refused, lines, reason):
    found = refused(f"{LEAST}[tracing]\n{lines}\n")
    assert reason in found
    assert "hunter2" not in found
