"""`rackloom admin`: what an operator does at a site, over its admin interface."""

from cyclopts import App

app = App(name="admin", help="Operate a site: switch controllers, machines, partitions, plans.")
# Named here and imported when one is called: the others' imports would cost every command its time.
_COMMANDS = {
    "endpoint": ("admin_endpoints:endpoint", "Switch controllers, by the chassis they speak for."),
    "browse": ("admin_endpoints:browse", "Print what a controller itself answers, as JSON."),
    "credential": ("admin_endpoints:credential", "Credentials of controllers."),
    "machine": ("admin_machines:machine", "Machines and where their GPUs are in the fabric."),
    "instance": ("admin_machines:instance", "Instances of tenants."),
    "logical-partition": ("admin_partitions:logical", "Logical partitions of tenants."),
    "partition": ("admin_partitions:partition", "Physical partitions, as the switch controllers show them."),
    "plan": ("admin_plans:plan", "Show what would be done to a domain now."),
    "apply": ("admin_plans:apply", "Carry out a plan."),
    "domain": ("admin_plans:domain", "Show, pause and resume NVLink domains."),
    "tray": ("admin_plans:tray", "Cordon and drain trays."),
}
for _name, (_where, _help) in _COMMANDS.items():
    app.command(f"rackloom.cli.{_where}", name=_name, help=_help)
