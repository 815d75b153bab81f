"""Everything that knows transformers."""
