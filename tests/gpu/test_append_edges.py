"""The append kernel over pages whose size is no power of two, where an index is divided and not shifted."""

from __future__ import annotations

import pytest
from test_append import BF16, check
from test_paged import noise

from tilewise.kvcache import KVFormat


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_scales_of_pages_of_any_size(name):
    """The scales of a page lie head by head: their place takes the page and the token in it apart."""
    form = KVFormat(name, 64)
    for page_size in (1, 3, 5, 16, 24):
        check(form, noise(40, 3, 64, dtype=BF16), noise(40, 3, 64, dtype=BF16), page_size=page_size, seed=page_size)
