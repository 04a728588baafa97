"""Evaluation tasks beside the validation loss: likelihood, choice and generation.

Read in this order: batching, scoring (likelihoods), writing (generation), eval_model
(both on texts), offline (tasks made of the validation text), harness
(lm-evaluation-harness).
"""
