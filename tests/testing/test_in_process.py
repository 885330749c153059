"""A site in a thread, from the view of its host process."""

import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog
from tests.proxies import with_dead_proxies
from tests.waiting import PATIENCE

from rackloom.app.process import log_beside_host
from rackloom.runtime.log_settings import structlog_configured
from rackloom.testing import start_site


def settings_of_the_process():
    return {
        "collector": (gc.get_threshold(), gc.isenabled()),
        "switches": sys.getswitchinterval(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "root": (logging.getLogger().level, list(logging.getLogger().handlers)),
    }


def settings_of_logging():
    ours = logging.getLogger("rackloom")
    return ours.level, ours.propagate, list(ours.handlers), structlog.is_configured(), structlog.get_config()


def open_files():
    # The descriptor that lists the folder is already closed again.
    return {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


@pytest.mark.slow
def test_a_thread_leaves_its_host_as_it_was(monkeypatch):
    masks, set_umask = [], os.umask
    monkeypatch.setattr(os, "umask", lambda mask: masks.append(mask) or set_umask(mask))
    with start_site(in_process=True):
        pass  # The first site does the imports and opens files that a process needs once.
    process, log, threads = settings_of_the_process(), settings_of_logging(), set(threading.enumerate())
    files, frozen = open_files(), gc.get_freeze_count()
    with start_site(in_process=True) as running:
        running.expect("devices", driver="gpu.nvidia.com", tray="rack-01/slot-0", count=4)
        assert running.log.read_text()
        assert settings_of_the_process() == process
        # There are fewer if objects that another test of this worker froze have died since.
        assert gc.get_freeze_count() <= frozen
    assert settings_of_the_process() == process
    assert settings_of_logging() == log
    assert masks == []
    assert not running.home.exists()
    deadline = time.monotonic() + PATIENCE
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert not [file for file in open_files() - files if file.startswith(("socket:", str(running.home)))]


@pytest.fixture
def host_without_structlog():
    """A host that has not configured structlog, even if other tests have."""
    with structlog_configured():
        structlog.reset_defaults()
        yield


@pytest.mark.usefixtures("host_without_structlog")
def test_sites_that_overlap_leave_the_logging_of_their_host_as_it_was(tmp_path):
    before = settings_of_logging()
    first, second = log_beside_host(), log_beside_host()
    first.__enter__()(tmp_path / "first")
    second.__enter__()(tmp_path / "second")
    first.__exit__(None, None, None)
    structlog.get_logger("rackloom.testing").info("still-there")
    second.__exit__(None, None, None)
    assert settings_of_logging() == before
    assert "still-there" in (tmp_path / "second").read_text()
    assert "still-there" not in (tmp_path / "first").read_text()


def test_a_host_that_configures_structlog_meanwhile_keeps_what_it_chose():
    before = structlog.get_config() if structlog.is_configured() else None
    chosen = [structlog.processors.KeyValueRenderer()]
    try:
        with log_beside_host():
            structlog.configure(processors=chosen)
        assert structlog.get_config()["processors"] is chosen
    finally:
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)


@pytest.mark.slow
def test_a_proxy_of_its_host_is_not_asked(monkeypatch):
    with_dead_proxies(monkeypatch)
    with start_site(in_process=True, seed=7) as running:
        assert running.seed == "7"
        running.do("make-logical-partition", name="training")
        running.expect("node", tray="rack-01/slot-0")
