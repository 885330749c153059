"""Other settings of structlog leave nothing behind."""

import structlog

from rackloom.runtime.log_settings import structlog_configured


def settings():
    return structlog.is_configured(), structlog.get_config()


def test_settings_are_as_before_afterwards():
    renderer = [structlog.processors.KeyValueRenderer()]
    before = settings()
    with structlog_configured(processors=renderer):
        assert structlog.get_config()["processors"] is renderer
        inside = settings()
        with structlog_configured(processors=[]):
            assert structlog.get_config()["processors"] == []
        assert settings() == inside
    assert settings() == before
