"""Model families: layers, loss, decoding, sizes, and weights in Hugging Face's format.

Other rooms know no layer and no parameter by name: `roles` describes each parameter,
`family` the interface of each family.
"""
