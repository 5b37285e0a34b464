"""The KV cache: pages shared by sequences and layers, storage formats, and the prefix tree over the pages."""

from tilewise.formats import FORMATS, KVFormat
from tilewise.kvcache.paged import OutOfPages, PagedKVCache
from tilewise.kvcache.pool import CacheStats
from tilewise.kvcache.prefix import PrefixCache
from tilewise.kvcache.rotation import Rotary
from tilewise.kvcache.slots import Slots
from tilewise.kvcache.tree import PrefixStats

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
