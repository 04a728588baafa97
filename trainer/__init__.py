"""A trainer of language models in JAX whose low precision can be trusted."""

__version__ = "0.1.0"  # also in pyproject.toml and CITATION.cff
