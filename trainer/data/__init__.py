"""From text to batches: sources, tokenizers, prepared shards, a stateless loader.

Read in this order: corpus (sources), tokenizer, encode and preparation (from text to
shards), shards (the prepared directory), loader, target_bytes (for bits per byte).

Readers: files, jsonl, parquet, compressed, hub_data, datasets_patches,
standard_library. Tokenizer files: bpe_files, json_tokenizer, hf_tokenizer,
tokenizer_settings. Checks of tokenizers that others wrote: line_cuts, word_patterns,
tokenizer_bounds.

Source: what a user names, such as files. Document: a text that end-of-text follows.
Split: the tokens for training ("train") or validation ("val", the validation part).
Shard: a file of a split's tokens. Window: T+1 consecutive tokens of a split.
"""

from trainer.data.corpus import (
    EmbeddedSource,
    HubSource,
    PreparedSource,
    Source,
    StandardLibrarySource,
    TextSource,
)
from trainer.data.custom import Batches
from trainer.data.loader import Batch, Loader, ShardLoader, prefetch
from trainer.data.preparation import Progress, check_prepared, prepare
from trainer.data.shards import Manifest
from trainer.data.tokenizer import Tokenizer, get_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "EmbeddedSource",
    "HubSource",
    "Loader",
    "Manifest",
    "PreparedSource",
    "Progress",
    "ShardLoader",
    "Source",
    "StandardLibrarySource",
    "TextSource",
    "Tokenizer",
    "check_prepared",
    "get_tokenizer",
    "prefetch",
    "prepare",
]
