"""The `baracuda` command: it parses, calls and draws."""

from .app import app

__all__ = ["app"]
