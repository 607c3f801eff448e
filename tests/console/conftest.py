from tests.e2e.conftest import settings, shelf

__all__ = ["settings", "shelf"]
