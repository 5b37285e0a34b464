"""The KV cache: pages shared by sequences and layers, storage formats, and the prefix tree over the pages."""

from tilewise.kvcache.formats import FORMATS, KVFormat
from tilewise.kvcache.paged import CacheStats, OutOfPages, PagedKVCache, Slots
from tilewise.kvcache.prefix import PrefixCache, PrefixStats
from tilewise.kvcache.rotary import Rotary

__all__ = [
    "FORMATS",
    "CacheStats",
    "KVFormat",
    "OutOfPages",
    "PagedKVCache",
    "PrefixCache",
    "PrefixStats",
    "Rotary",
    "Slots",
]
