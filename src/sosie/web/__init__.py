"""The explorer: a zoo in the browser, served on this machine and read only."""

from .app import create_app
from .serving import serve

__all__ = [
    "create_app",
    "serve",
]
