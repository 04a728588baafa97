"""Batches of a program: every token is the one before plus 1 or 2, modulo the
vocabulary, so that only the size of the step can be learnt."""

import numpy as np

B, T, V = 16, 33, 64


class Walk:
    vocab_size = V

    def __init__(self):
        self.validation = [self.batch(10**6)]

    def batch(self, step):
        rng = np.random.default_rng(step)
        steps = rng.integers(1, 3, size=(B, T)).cumsum(1)
        return (rng.integers(V, size=(B, 1)) + steps) % V
