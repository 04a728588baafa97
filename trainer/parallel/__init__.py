"""Several devices and processes: the mesh, where each array lives, and how gradients
become their mean.

Read `mesh` and `sharding` first; `distribute` has what the devices of a step send each
other.
"""
