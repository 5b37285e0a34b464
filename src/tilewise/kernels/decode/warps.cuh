// What a streaming warp of the decode kernels does: one item of its list after another. Body: Stream or Stream32.
#pragma once
#include "decode/merge.cuh"

// Computes the state of an item's rows over its tokens and stages it in shared memory.
template <class Body>
TILE_DEVICE void stream_item(const DecodeArgs& args, const DecodeItem& item, int length, Span span, Loader& loader,
                             Turn<kStages>& turn, int rank) {
    Body body(args, loader);
    body.begin(item, length, span);
    // Pieces are counted from the range's first chunk, even if a window hides it.
    const int end = span.end > span.begin ? (span.end + kChunk - 1) / kChunk : 0;
    int chunk = span.begin / kChunk, piece_end = end, fold = item.fold();  // fold: negative once a piece has been saved
    if (fold > 0) piece_end = chunk + fold - (chunk - item.start / kChunk) % fold;
    for (; chunk < end; turn.next()) {
        loader.wait(turn);
        body.step(loader, turn.stage, chunk * kChunk, span);
        ptx::sync_warp();  // all lanes have read the stage
        loader.request(turn.stage);
        if (++chunk == piece_end && chunk < end) {
            body.finish_piece();
            if (fold < 0) body.fold(rank);
            else fold = -fold;
            body.save(rank);
            body.begin_piece();
            piece_end -= fold;
        }
    }
    body.finish_piece();
    if (fold < 0) body.fold(rank);
    Staged(rank).take(body);
}

template <class Body>
TILE_DEVICE void stream(const DecodeArgs& args, const TensorMap& mK, const TensorMap& mV, int rank) {
    Loader loader(args, mK, mV, rank);
    loader.start();
    Turn<kStages> turn;
    for (int slot = rank - kWarps; loader.next_item(slot);) {
        const DecodeItem item = Loader::item(args, slot);
        if (item.rows == 0) break;  // no item follows an empty one
        const int length = length_of(args, item.sequence, item.kv_head());
        const Span span = span_of(args, item, length);
        if (span.begin == span.end) {
            put_empty(args, item);
            continue;
        }
        stream_item<Body>(args, item, length, span, loader, turn, rank);
        // The item is read again, from the L1 cache: kept, it would take registers from the products.
        put_item(args, Loader::item(args, ptx::just_in_time(slot)), Staged(rank));
    }
}
