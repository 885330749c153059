"""What every test shares: hypothesis never fails a test for being slow on a busy machine."""

from hypothesis import settings

settings.register_profile("steady", deadline=None)
settings.load_profile("steady")
