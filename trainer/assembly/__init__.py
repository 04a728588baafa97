"""From a checked configuration to objects, and to the run or the plan that they are
for.

This is the only room that reads a configuration: `objects` builds the parts, `run` and
`planning` put them together.
"""
