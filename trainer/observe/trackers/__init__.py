"""Where rows, events, samples and pictures go: a protocol and a file for each tracker
behind it.

`protocol` says what a tracker is told and must promise; `jsonl`, `wandb` and
`tensorboard` are trackers; `choose` makes the one that the configuration names.
"""
