// What a streaming warp of the decode kernel does: item after item of its list.
#pragma once
#include "decode/merge.cuh"

// The state of an item's rows over its tokens, staged
TILE_DEVICE void stream_item(const DecodeArgs& args, const DecodeItem& item, int length, Span span, Loader& loader, Turn<kStages>& turn, int rank) {
    Stream body(args, loader);
    body.begin(item, length, span);
    // Pieces are counted from the range's first chunk, which a window may hide.
    const int end = span.end > span.begin ? (span.end + kChunk - 1) / kChunk : 0;
    int chunk = span.begin / kChunk, piece_end = end, fold = item.fold();  // negative when a piece has been kept
    if (fold > 0) piece_end = chunk + fold - (chunk - item.start / kChunk) % fold;
    for (; chunk < end; turn.next()) {
        loader.wait(turn);
        body.step(loader, turn.stage, chunk * kChunk, span);
        ptx::sync_warp();  // all lanes are done with it
        loader.ask(turn.stage);
        if (++chunk == piece_end && chunk < end) {
            body.finish_piece();
            if (fold < 0) body.fold(rank);
            else fold = -fold;
            body.keep(rank);
            body.begin_piece();
            piece_end -= fold;
        }
    }
    body.finish_piece();
    if (fold < 0) body.fold(rank);
    Staged(rank).take(body);
}

TILE_DEVICE void stream(const DecodeArgs& args, const TensorMap& mK, const TensorMap& mV, int rank) {
    Loader loader(args, mK, mV, rank);
    loader.start();
    Turn<kStages> turn;
    for (int slot = rank - kWarps; loader.next_item(slot);) {
        const DecodeItem item = Loader::item(args, slot);
        if (item.rows == 0) break;  // nor is there anything after it
        const int length = Global<const int>{args.lengths}[item.table];
        const Span span = span_of(args, item, length);
        if (span.begin == span.end) {
            put_empty(args, item);
            continue;
        }
        stream_item(args, item, length, span, loader, turn, rank);
        // What the item is is read again, from the nearest cache: it must not take registers from the products.
        put_item(args, Loader::item(args, ptx::just_in_time(slot)), Staged(rank));
    }
}
