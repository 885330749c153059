"""A site in a thread, seen by the process that it is a guest of."""

import logging

import pytest
import structlog

from rackloom.testing import start_site


@pytest.mark.slow
def test_a_thread_leaves_logging_and_files_of_its_host_alone(tmp_path):
    # Another test of this process may have a site too.
    root, ours = list(logging.getLogger().handlers), list(logging.getLogger("rackloom").handlers)
    was_configured = structlog.is_configured()
    with start_site(in_process=True) as running:
        assert logging.getLogger().handlers == root
        assert running.log.read_text()
        (tmp_path / "file").touch()
        assert (tmp_path / "file").stat().st_mode & 0o044
    assert structlog.is_configured() == was_configured
    assert logging.getLogger("rackloom").handlers == ours
    assert not running.home.exists()
