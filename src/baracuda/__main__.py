"""`python -m baracuda`, the same as the `baracuda` command."""

from baracuda_cli import app

app()
