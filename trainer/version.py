"""The version of the trainer; pyproject.toml and CITATION.cff have it too."""

__version__ = "0.1.0"
