"""The database schema: every table of the site.

One table definition serves the record functions, the store and the migrations. The migrations are
Alembic revisions in `migrations/` beside this file. `migrate.migrate_to_head` runs them.

Fabric GUIDs are unsigned 64-bit numbers. SQLite and PostgreSQL integers cannot hold them, so they are
stored as decimal text, which is also the form that REST shows. Times are seconds since the epoch, as
doubles.
"""

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _id() -> sa.Column[str]:
    return sa.Column("id", sa.String(64), primary_key=True)


def _ref(name: str, target: str, *, nullable: bool = False, index: bool = True) -> sa.Column[str]:
    return sa.Column(name, sa.String(64), sa.ForeignKey(f"{target}.id"), nullable=nullable, index=index)


def _text(name: str, *, nullable: bool = False, index: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=nullable, index=index)


def _time(name: str, *, nullable: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=nullable)


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=nullable)


WIDE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""64 bits, for numbers that grow with every write and for ids that a controller chooses. On SQLite every
integer has 64, and only a column of type INTEGER can number rows automatically."""


def _wide_number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, WIDE, nullable=nullable)


def _json(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.JSON, nullable=False)


def _unique(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, unique=True)


def _times() -> tuple[sa.Column[float], sa.Column[float]]:
    return _time("created"), _time("updated")


def _entity(name: str, *items: sa.schema.SchemaItem) -> sa.Table:
    """A table of rows with an id, and the times of their creation and last change."""
    return sa.Table(name, metadata, _id(), *items, *_times())


def _of_tenant(name: str, *items: sa.schema.SchemaItem) -> sa.Table:
    """An entity that a tenant owns. Listings are in the order of creation: a page is read from the index.

    Indexes start with the tenant, or with a column that has values of one tenant only. The database could
    choose any other for a list of the tenant, and would pass over the rows of all tenants.
    """
    table = _entity(name, _ref("tenant_id", "tenant", index=False), *items)
    sa.Index(f"ix_{name}_tenant_id_created_id", table.c.tenant_id, table.c.created, table.c.id)
    return table


def _per_machine(name: str, *items: sa.schema.SchemaItem) -> sa.Table:
    """A table with a key that is, or begins with, the machine id."""
    machine_id = sa.Column("machine_id", sa.String(64), sa.ForeignKey("machine.id"), primary_key=True)
    return sa.Table(name, metadata, machine_id, *items)


def _per_domain(name: str, *items: sa.schema.SchemaItem) -> sa.Table:
    """A table with a key that is, or begins with, the domain uuid."""
    return sa.Table(name, metadata, sa.Column("domain", sa.Text, primary_key=True), *items)


provider = _entity("provider", _unique("org"))

tenant = _entity(
    "tenant", _unique("org"), sa.Column("targeted_instance_creation", sa.Boolean, nullable=False)
)

site = _entity(
    "site",
    _ref("provider_id", "provider"),
    _unique("name"),
    _text("description", nullable=True),
    _text("status"),
    _json("capabilities"),
    sa.Column("extra", sa.JSON, nullable=False, default=dict, server_default="{}"),
    _text("default_partition"),
)

instance_type = _entity(
    "instance_type",
    _ref("site_id", "site"),
    _text("name"),
    _text("description", nullable=True),
    _json("labels"),
    _json("capabilities"),
    _text("status"),
    sa.UniqueConstraint("site_id", "name"),
)

machine = _entity(
    "machine",
    _ref("site_id", "site", index=False),
    _ref("instance_type_id", "instance_type", nullable=True),
    _text("status"),
    _text("chassis_serial"),
    _number("slot"),
    _number("tray_index"),
    _text("rack"),
    _text("domain", nullable=True, index=True),
    _time("missing_since", nullable=True),
    sa.Column("labels", sa.JSON, nullable=False, default=dict, server_default="{}"),
    sa.UniqueConstraint("chassis_serial", "slot"),
    # A batch reads the size of the largest domain.
    sa.Index("ix_machine_site_id_domain", "site_id", "domain"),
)

machine_gpu = _per_machine(
    "machine_gpu",
    sa.Column("module_id", sa.Integer, primary_key=True),
    _text("guid", nullable=True, index=True),
    _text("source", nullable=True),
    # Indexed: placement reads the few GPUs that are not healthy.
    sa.Column("health", sa.Integer, nullable=False, index=True),
)

moved_gpu = _per_machine(
    "moved_gpu", sa.Column("module_id", sa.Integer, primary_key=True), _text("guid"), _time("since")
)

foreign_tray = _per_machine("foreign_tray", sa.Column("partition_id", WIDE, primary_key=True), _text("name"))

allocation = _entity(
    "allocation",
    _ref("tenant_id", "tenant"),
    _ref("site_id", "site", index=False),
    _text("name"),
    _text("description", nullable=True),
    _text("status"),
    sa.UniqueConstraint("tenant_id", "site_id", "name"),
)

allocation_constraint = _entity(
    "allocation_constraint",
    _ref("allocation_id", "allocation"),
    _ref("instance_type_id", "instance_type"),
    _number("value"),
    sa.UniqueConstraint("allocation_id", "instance_type_id"),
)

tenant_quota = sa.Table(
    "tenant_quota",
    metadata,
    sa.Column("tenant_id", sa.String(64), sa.ForeignKey("tenant.id"), primary_key=True),
    sa.Column("kind", sa.Text, primary_key=True),
    _number("value"),
    _time("updated"),
)

tenant_total = sa.Table(
    "tenant_total",
    metadata,
    sa.Column("tenant_id", sa.String(64), sa.ForeignKey("tenant.id"), primary_key=True),
    sa.Column("kind", sa.Text, primary_key=True),
    _number("value"),
)
"""How many objects of each kind (`tenancy.entitlements.QuotaKind`) a tenant has. Triggers count them, which
the migrations make: nothing else writes here."""

custom_role = _entity(
    "custom_role",
    _text("org"),
    _text("name"),
    _text("side"),
    _text("description", nullable=True),
    _json("permissions"),
    sa.UniqueConstraint("org", "name"),
)

service_account = _entity(
    "service_account",
    _text("org"),
    _text("name"),
    _text("description", nullable=True),
    _text("created_by"),
    _json("roles"),
    _time("expires", nullable=True),
    sa.UniqueConstraint("org", "name"),
)

service_account_key = sa.Table(
    "service_account_key",
    metadata,
    _id(),
    _ref("account_id", "service_account"),
    _text("hash"),
    _time("created"),
    _time("last_used", nullable=True),
)

identity_revision = sa.Table("identity_revision", metadata, _id(), _text("revision"))
"""One row. Its `revision` differs after each change of the three tables above."""

tray_reservation = _entity(
    "tray_reservation",
    _ref("tenant_id", "tenant"),
    _ref("site_id", "site", index=False),
    _ref("instance_type_id", "instance_type"),
    _text("reason"),
    _text("asked_by"),
    # From then on its trays are free, and this is not recorded anywhere.
    _time("until"),
)

# One row for a tray: no tray waits for two organisations.
reserved_tray = _per_machine("reserved_tray", _ref("reservation_id", "tray_reservation"))

_deleting = sa.text("status = 'Deleting'")
logical_partition = _of_tenant(
    "logical_partition",
    _ref("site_id", "site", index=False),
    _text("name"),
    _text("description", nullable=True),
    _text("status"),
    sa.UniqueConstraint("tenant_id", "name"),
    # Every pass over a domain reads those in deletion.
    sa.Index(
        "ix_logical_partition_deleting", "tenant_id", sqlite_where=_deleting, postgresql_where=_deleting
    ),
)

is_partition_deleting = logical_partition.c.status == sa.literal_column("'Deleting'")
"""The condition of the partial index, which a parameter would not match."""

vpc = _of_tenant(
    "vpc",
    _ref("site_id", "site", index=False),
    _text("name"),
    _text("description", nullable=True),
    _ref("logical_partition_id", "logical_partition", nullable=True),
    _text("status"),
    _json("extra"),
    sa.UniqueConstraint("tenant_id", "site_id", "name"),
)

instance = _of_tenant(
    "instance",
    _ref("site_id", "site", index=False),
    _ref("vpc_id", "vpc"),
    _ref("instance_type_id", "instance_type", nullable=True),
    # Unique: a machine carries one instance at most.
    sa.Column("machine_id", sa.String(64), sa.ForeignKey("machine.id"), nullable=False, unique=True),
    _text("name"),
    _text("description", nullable=True),
    _text("status"),
    _text("placement"),
    _time("intent_at"),
    _json("extra"),
    sa.UniqueConstraint("tenant_id", "site_id", "name"),
    # Each creation counts the tenant's use of each type.
    sa.Index("ix_instance_tenant_id_instance_type_id", "tenant_id", "instance_type_id"),
)

nvlink_interface = _entity(
    "nvlink_interface",
    _ref("instance_id", "instance"),
    _ref("logical_partition_id", "logical_partition"),
    _number("device_instance"),
    _text("status"),
    _text("reason", nullable=True),
    _time("intent_at"),
)

endpoint = _entity("endpoint", _unique("url"), _text("domain", nullable=True, index=True))

endpoint_chassis = sa.Table(
    "endpoint_chassis",
    metadata,
    sa.Column("chassis_serial", sa.Text, primary_key=True),
    _ref("endpoint_id", "endpoint"),
)

observation = sa.Table(
    "observation",
    metadata,
    sa.Column("endpoint_id", sa.String(64), sa.ForeignKey("endpoint.id"), primary_key=True),
    _text("facts", nullable=True),
    _time("observed_at", nullable=True),
    _time("unknown_since", nullable=True),
    _text("unknown_reason", nullable=True),
)

operation = sa.Table(
    "operation",
    metadata,
    sa.Column("id", WIDE, primary_key=True, autoincrement=True),
    _ref("endpoint_id", "endpoint"),
    _text("domain", nullable=True, index=True),
    _text("kind"),
    _text("partition_name"),
    _text("asked_by"),
    _text("reason"),
    _json("detail"),
    _text("state"),
    _text("code", nullable=True),
    _text("message", nullable=True),
    _time("observed_at"),
    _time("started"),
    _time("finished", nullable=True),
    _time("observed_after", nullable=True),
    # Every pass reads the unanswered and the unconfirmed operations: both have no time here.
    sa.Index("ix_operation_endpoint_id_observed_after", "endpoint_id", "observed_after"),
    sqlite_autoincrement=True,
)

owned_partition = _per_domain(
    "owned_partition",
    sa.Column("name", sa.Text, primary_key=True),
    # No foreign key: the name outlives its logical partition, until no reading lists it any more.
    sa.Column("logical_partition_id", sa.String(64), nullable=False, index=True),
    _wide_number("partition_id", nullable=True),
    sa.Column("operation_id", WIDE, sa.ForeignKey("operation.id"), nullable=False),
    _time("seen_at", nullable=True),
    _time("created"),
)

status_history = sa.Table(
    "status_history",
    metadata,
    sa.Column("id", WIDE, primary_key=True, autoincrement=True),
    sa.Column("object_id", sa.String(64), nullable=False, index=True),
    _text("status"),
    _text("message"),
    *_times(),
    sqlite_autoincrement=True,
)

domain_revision = _per_domain("domain_revision", _wide_number("revision"))

domain_lease = sa.Table(
    "domain_lease",
    metadata,
    sa.Column("endpoint_id", sa.String(64), sa.ForeignKey("endpoint.id"), primary_key=True),
    _text("holder"),
    _time("until"),
    _number("epoch"),
)

replica = sa.Table("replica", metadata, sa.Column("holder", sa.Text, primary_key=True), _time("until"))

domain_pause = _per_domain("domain_pause", _text("reason"), _text("asked_by"), _time("created"))

domain_dispute = _per_domain("domain_dispute", _text("reason"), _time("since"), _text("rival", nullable=True))

blocked_gpu = _per_domain(
    "blocked_gpu",
    sa.Column("guid", sa.Text, primary_key=True),
    sa.Column("reason", sa.Text, primary_key=True),
    _text("fix", nullable=True),
    _time("since"),
)

cordon = _per_machine("cordon", _text("reason"), _text("asked_by"), _time("created"))

drain = sa.Table(
    "drain",
    metadata,
    _id(),
    _ref("machine_id", "machine"),
    # No foreign key: the record outlives the instance that was drained.
    sa.Column("instance_id", sa.String(64), nullable=True),
    _text("reason"),
    _text("asked_by"),
    _text("message"),
    _time("started"),
    _time("drained", nullable=True),
    _time("ended", nullable=True),
)

operator_step = sa.Table(
    "operator_step",
    metadata,
    sa.Column("id", WIDE, primary_key=True, autoincrement=True),
    _text("step"),
    _text("subject", index=True),
    _text("domain", nullable=True, index=True),
    _text("asked_by"),
    _text("reason"),
    _time("created"),
    sqlite_autoincrement=True,
)

tenant_event = sa.Table(
    "tenant_event",
    metadata,
    sa.Column("tenant_id", sa.String(64), sa.ForeignKey("tenant.id"), primary_key=True),
    sa.Column("number", WIDE, primary_key=True),
    _text("kind"),
    _text("object_id"),
    _text("status"),
    _text("message", nullable=True),
    _time("created"),
)

event_counter = sa.Table(
    "event_counter",
    metadata,
    sa.Column("tenant_id", sa.String(64), sa.ForeignKey("tenant.id"), primary_key=True),
    _wide_number("newest"),
)

audit_entry = sa.Table(
    "audit_entry",
    metadata,
    # Never used twice, also when the newest entry was removed: an id is a position in the log.
    sa.Column("id", WIDE, primary_key=True, autoincrement=True),
    sa.Column("created", sa.Double, nullable=False, index=True),
    _time("first", nullable=True),
    _time("last", nullable=True),
    _number("requests"),
    _text("channel"),
    _text("subject"),
    _text("org"),
    _text("roles"),
    sa.Column("by_operator", sa.Boolean, nullable=False),
    _text("source"),
    _text("request_id"),
    _text("operation"),
    _text("method"),
    _text("path"),
    _text("object_kind"),
    _text("object_id"),
    _text("object_name"),
    # No foreign keys: an entry outlives its subject.
    _text("tenant_org", nullable=True),
    _number("status"),
    _text("code"),
    _text("message"),
    _text("reason"),
    _json("fields"),
    _number("duration_ms", nullable=True),
    # Pages are read by position, within one of these.
    sa.Index("ix_audit_entry_tenant_org_id", "tenant_org", "id"),
    sa.Index("ix_audit_entry_subject_id", "subject", "id"),
    sa.Index("ix_audit_entry_object_id_id", "object_id", "id"),
    sqlite_autoincrement=True,
)

audit_removal = sa.Table(
    "audit_removal",
    metadata,
    # One row: how many entries retention removed, up to which one, and when that was written.
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("removed", sa.BigInteger, nullable=False),
    _wide_number("up_to"),
    _time("until"),
)
