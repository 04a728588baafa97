"""What a model can do beside predicting its validation text: tasks of likelihood, of
choice and of generation.

Read in this order: batching, scoring (likelihoods), writing (generation), eval_model
(both on texts), offline (tasks made of the validation text), harness (those of
lm-evaluation-harness).
"""
