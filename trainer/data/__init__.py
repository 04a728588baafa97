"""Text to batches: sources, tokenizers, prepared shards, a stateless loader.

Read in this order: corpus (sources), tokenizer, prepare (source to shards), shards (the prepared directory), loader.
"""

from trainer.data.corpus import EmbeddedSource, Source
from trainer.data.loader import Batch, Loader, prefetch
from trainer.data.prepare import Progress, prepare
from trainer.data.shards import Manifest
from trainer.data.tokenizer import Tokenizer, get_tokenizer

__all__ = [
    "Batch",
    "EmbeddedSource",
    "Loader",
    "Manifest",
    "Progress",
    "Source",
    "Tokenizer",
    "get_tokenizer",
    "prefetch",
    "prepare",
]
