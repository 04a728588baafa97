"""Tools that say where a scaled program loses values: `explain`, checks for tests."""
