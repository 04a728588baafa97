"""`ScaledArray`, narrow data and a power-of-two scale, and trees that hold some."""
