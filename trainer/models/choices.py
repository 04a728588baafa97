"""Choices that the specs of several families have."""

# Members of jax.checkpoint_policies that are policies; the others are functions that
# make one.
REMAT_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
REMATS = ("none", "elementwise", "block", *REMAT_POLICIES)

SAME_MLP = {"swiglu", "smooth_swiglu"}  # one function, rounded differently
