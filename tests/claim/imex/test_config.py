from pathlib import PurePath

from rackloom.claim.imex.config import ImexConfig, ImexTls, config_text, daemon_host, nodes_text

NODES = PurePath("/imexd/nodes.cfg")


def options(config: ImexConfig) -> dict[str, str]:
    return dict(line.split("=", 1) for line in config_text(config).splitlines())


def test_peers_must_authenticate_each_other_where_certificates_are_given():
    reported = options(ImexConfig("10.0.0.7", NODES, ImexTls(PurePath("/tls"), "domain.imex")))
    assert reported["IMEX_ENABLE_AUTH_ENCRYPTION"] == "1"
    assert reported["IMEX_AUTH_ENCRYPTION_MODE"] == "SSL_TLS"
    assert reported["IMEX_SERVER_KEY"] == reported["IMEX_CLIENT_KEY"] == "/tls/tls.key"
    assert reported["IMEX_CLIENT_CERT_AUTH"] == "/tls/ca.crt"
    assert reported["IMEX_SECURITY_TARGET_OVERRIDE"] == "domain.imex"


def test_without_certificates_authentication_is_said_to_be_off():
    reported = options(ImexConfig("10.0.0.7", NODES, None))
    assert reported["IMEX_ENABLE_AUTH_ENCRYPTION"] == "0"
    assert "IMEX_SERVER_KEY" not in reported


def test_no_address_is_bound_beside_a_node_file_of_names():
    """nvidia-imex would compare it with the name of this node, and never start."""
    reported = options(ImexConfig("10.0.0.7", NODES, None, "dns"))
    assert (reported["BIND_INTERFACE_IP"], reported["IMEX_CMD_BIND_INTERFACE_IP"]) == ("", "10.0.0.7")
    reported = options(ImexConfig("10.0.0.7", NODES, None, "ip"))
    assert (reported["BIND_INTERFACE_IP"], reported["IMEX_CMD_BIND_INTERFACE_IP"]) == ("10.0.0.7", "10.0.0.7")


def test_daemon_stays_in_the_foreground_and_is_asked_where_the_pod_is():
    reported = options(ImexConfig("fd00::7", NODES, None))
    assert (reported["DAEMONIZE"], reported["IMEX_CMD_BIND_INTERFACE_IP"]) == ("0", "fd00::7")
    assert (reported["SERVER_PORT"], reported["IMEX_CMD_PORT"]) == ("50000", "50005")
    assert reported["IMEX_NODE_CONFIG_FILE"] == "/imexd/nodes.cfg"


def test_a_line_number_is_an_index():
    assert nodes_text([daemon_host(0), daemon_host(17)]) == (
        "compute-domain-daemon-0000\ncompute-domain-daemon-0017\n"
    )
