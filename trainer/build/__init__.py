"""From a checked configuration to objects, and to the run that they are for: the only package that reads it."""
