"""Several devices and processes: the mesh, shardings of state and batches, and
communication.

Read `mesh` and `distribute` first; `diloco` and `replicas` are for `parallel=diloco`,
`leafwise` is for the first state.
"""
