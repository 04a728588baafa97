"""Several devices and processes: the mesh, who holds what, and what is sent between
them.

Read `mesh` and `distribute` first; `diloco` and `replicas` are for `parallel=diloco`.
"""
