"""The documentation site: `python -m docs.site` fills the pages, builds them and checks the result."""
