"""The vocabulary: element kinds, scopes, problems and their op table, packed storage. It imports nothing above it."""

from .versions import require_torch

require_torch()
