// What a streaming warp of the decode kernel does: item after item of its list.
#pragma once
#include "sm90/decode_merge.cuh"

TILE_DEVICE void stream(const DecodeArgs& args, const TensorMap& mK, const TensorMap& mV, int rank) {
    Loader loader(args, mK, mV, rank);
    loader.start();
    Turn<kStages> turn;
    for (int round = 0; round < args.rounds; round++) {
        const DecodeItem item = Loader::item(args, round, rank);
        // A piece that its sequence does not reach yet leaves nothing. (Nodes do not grow.)
        if (item.rows == 0 || item.state() >= states_of(args, item.sequence).count) continue;
        const Span span = span_of(args, item);
        Stream body(args);
        body.begin(item, span);
        // Pieces are counted from the range's first chunk, which a window may hide.
        const int end = span.end > span.begin ? (span.end + kChunk - 1) / kChunk : 0, fold = item.fold();
        int chunk = span.begin / kChunk, piece_end = end;
        if (fold > 0) piece_end = chunk + fold - (chunk - item.start / kChunk) % fold;
        bool folded = false;
        for (; chunk < end; turn.next()) {
            loader.wait(turn);
            body.step(loader, turn.stage, chunk * kChunk, span);
            ptx::sync_warp();  // all lanes are done with it
            loader.ask(turn.stage);
            if (++chunk == piece_end && chunk < end) {
                body.finish_piece();
                if (folded) body.fold(rank);
                body.keep(rank);
                body.begin_piece();
                folded = true;
                piece_end += fold;
            }
        }
        body.finish_piece();
        if (folded) body.fold(rank);
        store_fragments(args, item, body);
    }
}
