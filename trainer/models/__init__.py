"""The architectures: what each is made of, its loss, its decoding, its sizes, and its
weights elsewhere.

No other room names a layer or a leaf of a model: `roles` says what each parameter is,
`family` what each model gives.
"""
