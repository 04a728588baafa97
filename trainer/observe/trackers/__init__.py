"""Trackers, which record rows, events, samples and pictures of a run.

`protocol` is their interface; `jsonl`, `wandb` and `tensorboard` are trackers; `choose`
makes the one that the configuration names.
"""
