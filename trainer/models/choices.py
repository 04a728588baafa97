"""Choices in the specs of several families."""

# The members of jax.checkpoint_policies that are policies; other members are functions
# that return policies.
REMAT_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
REMAT_MODES = ("none", "elementwise", "block", *REMAT_POLICIES)

# MLPs that compute the same function, and differ only in roundings.
EQUIVALENT_MLPS = {"swiglu", "smooth_swiglu"}
