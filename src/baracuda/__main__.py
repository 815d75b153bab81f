"""`python -m baracuda`, the same as the `baracuda` command."""

from .cli.app import app

app()
