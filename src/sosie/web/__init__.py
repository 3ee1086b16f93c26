"""The explorer: a zoo in the browser, read-only and served on this machine."""

from .app import create_app
from .serving import serve

__all__ = [
    "create_app",
    "serve",
]
