"""`python -m baracuda`, the same as the `baracuda` command."""

from .cli import app

app()
