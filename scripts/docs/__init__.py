"""The documentation site that `make docs` builds: pages made from the code."""
