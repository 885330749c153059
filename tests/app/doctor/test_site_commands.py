"""Fixes are printed with the options that they need to reach the examined site."""

import re
import shlex
from pathlib import Path

import pytest

from rackloom.app.doctor import command_access
from rackloom.cli.main import app
from rackloom.core.diagnosis.findings import fails
from rackloom.core.diagnosis.report import SiteCommands, with_site_commands

SHOW = "rackloom admin domain show d0"
BOTH = "kubectl cordon n1 && kubectl -n team delete pod a  # healed, kubectl uncordon n1"
OPERATOR = {f"RACKLOOM_ADMIN_{name}": "/etc/it.pem" for name in ("CA", "CERT", "KEY")}


def reported(fix, commands):
    (found,) = with_site_commands([fails("check", "it", "is broken", fix)], commands)
    return found.fix


def test_of_itself_a_command_stays_as_it_is():
    for fix in (SHOW, BOTH, "rackloom up --home H"):
        assert reported(fix, SiteCommands()) == fix


def test_every_kubectl_of_a_fix_asks_the_cluster_that_was_examined():
    commands = command_access(None, None, Path("/k f"), {})
    options = "kubectl --kubeconfig '/k f'"
    assert reported(BOTH, commands) == (
        f"{options} cordon n1 && {options} -n team delete pod a  # healed, {options} uncordon n1"
    )


def test_the_site_of_rackloom_up_is_reached_over_rest(tmp_path):
    fix = reported(f"{SHOW}  # then see to it", command_access(tmp_path, None, None, {}))
    assert fix == (
        f"rackloom token --home {tmp_path} --org demo --role PROVIDER_ADMIN  # rackloom up serves REST "
        f"alone: with this token it does what elsewhere does {SHOW}; then see to it"
    )
    words = shlex.split(fix, comments=True)
    app.parse_args(words[1:], print_error=False, exit_on_error=False)


def configured(ground, found, put):
    """A configuration in which the lines of [admin] that match are others."""
    path = ground.config()
    path.write_text(re.sub(found, put, path.read_text(), flags=re.DOTALL))
    return path


LISTEN = r'(?<=\[admin\]\n)listen = "[^"]*"'


@pytest.mark.parametrize(
    ("environment", "begin", "end"),
    [
        (
            {},
            "RACKLOOM_ADMIN_SITE=10.0.0.9:1079 ",
            "RACKLOOM_ADMIN_CA, RACKLOOM_ADMIN_CERT, RACKLOOM_ADMIN_KEY set",
        ),
        (OPERATOR, "RACKLOOM_ADMIN_SITE=10.0.0.9:1079 ", "d0"),
        (OPERATOR | {"RACKLOOM_ADMIN_SITE": "elsewhere:1079"}, "rackloom admin", "d0"),
    ],
)
def test_a_configured_site_is_reached_where_it_listens(ground, environment, begin, end):
    commands = command_access(None, configured(ground, LISTEN, 'listen = "10.0.0.9:1079"'), None, environment)
    fix = reported(SHOW, commands)
    assert fix.startswith(begin)
    assert fix.endswith(end)


def test_what_listens_everywhere_is_reached_here(ground):
    commands = command_access(None, configured(ground, LISTEN, 'listen = "0.0.0.0:2079"'), None, OPERATOR)
    assert reported(SHOW, commands) == f"RACKLOOM_ADMIN_SITE=localhost:2079 {SHOW}"


def test_a_site_without_an_admin_interface_says_so(ground):
    assert "no section [admin]" in reported(
        SHOW, command_access(None, configured(ground, r"\[admin\].*?(?=\n\[)", ""), None, {})
    )


def test_the_context_of_the_configuration_is_named_unless_another_kubeconfig_is(ground):
    config = ground.config(kubernetes='kubeconfig = "/etc/kube"\ncontext = "prod"')
    assert reported("kubectl get nodes", command_access(None, config, None, {})) == (
        "kubectl --kubeconfig /etc/kube --context prod get nodes"
    )
    assert (
        reported("kubectl get nodes", command_access(None, config, Path("/k"), {}))
        == "kubectl --kubeconfig /k get nodes"
    )


def test_a_context_that_was_given_is_part_of_each_command(ground):
    config = ground.config(kubernetes='kubeconfig = "/etc/kube"\ncontext = "prod"')
    assert reported("kubectl get nodes", command_access(None, config, Path("/k"), {}, context="lab")) == (
        "kubectl --kubeconfig /k --context lab get nodes"
    )
    assert reported("kubectl get nodes", command_access(None, None, None, {}, context="lab")) == (
        "kubectl --context lab get nodes"
    )
