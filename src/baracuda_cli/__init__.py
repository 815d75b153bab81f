"""The `baracuda` command: it parses, calls and draws.

It is a package beside `baracuda`, because importing anything inside `baracuda` imports torch, which takes seconds: help
and completion must not wait for that. Commands import what they need when they run.
"""

from .app import app

__all__ = ["app"]
