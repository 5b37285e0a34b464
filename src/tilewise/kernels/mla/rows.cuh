// Where rows of the cache lie, and what becomes of those that are codes.
#pragma once
#include "mla/work.cuh"

// The positions that a query token has chosen. caller: its number
struct Chosen {
    const int* list;
    int length;  // of the sequence
    PageTable table;
    TILE_DEVICE Chosen(const MlaArgs& mla, int caller) {
        const int place = Global<const int>{mla.places}[mla.queries.quotient(caller)];
        const int from = Global<const int>{mla.tail_from}[place];
        list = mla.indices + int64_t(caller) * mla.chosen;
        length = Global<const int>{mla.lengths}[place];
        table = {mla.pages + int64_t(place) * mla.table_pages,
                 mla.tails + int64_t(place) * mla.tail_pages - from, from};
    }
    // The n-th of them, −1 for none
    TILE_DEVICE int at(int n) const {
        const int position = Global<const int>{list}[n];
        return position < length ? position : -1;
    }
};

// Where a token of an item lies; page −1: nowhere
struct RowPlace {
    int page = -1, slot = 0;
    RowPlace() = default;
    TILE_DEVICE RowPlace(const DecodeArgs& args, const MlaArgs& mla, const DecodeItem& item, Span span, int token) {
        if (token < span.begin || token >= span.end) return;
        if constexpr (kChosen) {
            const Chosen chosen(mla, item.caller());
            const int position = chosen.at(token);
            if (position < 0) return;
            page = chosen.table.page(position / kPageSize);
            slot = position % kPageSize;
        } else {
            page = page_table(args, item.table, item.kv_head(), item.tail_from).page(token / kPageSize);
            slot = token % kPageSize;
        }
    }
    TILE_DEVICE const uint8_t* in(const Paged& part) const {  // whose strides are in bytes
        return static_cast<const uint8_t*>(part.base) + page * part.page + slot * part.token;
    }
};

// Sixteen codes, multiplied with their scale, as two times eight values
TILE_DEVICE void widen_codes(Vector16 (&to)[2], const Vector16& codes, float scale) {
#pragma unroll
    for (int w = 0; w < 4; w++) {
        uint32_t halves[2];
        if constexpr (kFormat == Format::fp8) {
            halves[0] = quant::from_fp8<false>(codes.word[w]);
            halves[1] = quant::from_fp8<true>(codes.word[w]);
        } else {
            const uint32_t x = codes.word[w] ^ 0x80808080u;
            halves[0] = quant::from_int8<0x4140>(x);
            halves[1] = quant::from_int8<0x4342>(x);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            to[w / 2].word[w % 2 * 2 + i] =
                pack<Element>(unpack<half>(halves[i], 0) * scale, unpack<half>(halves[i], 1) * scale);
    }
}
