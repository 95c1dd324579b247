"""Settings shared by all tests."""

from hypothesis import settings

settings.register_profile("kvpp", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("kvpp")
