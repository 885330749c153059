"""The site's records: schema, transactions on SQLite or PostgreSQL, rows, journals, revisions, values.

Other packages write record functions `fn(conn, ...)`. `database.Store` runs each one as a transaction.
`audit` is the log of requests, and `audit_trail` writes it beside each change. `failures` names
the faults of a database that lie outside of this program.
"""
