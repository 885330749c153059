"""The small site of the REST tests, for the forms that act by REST."""

from tests.carve.api.conftest import api, served
from tests.carve.conftest import database, portal, site_template, small_site

__all__ = ["api", "database", "portal", "served", "site_template", "small_site"]
