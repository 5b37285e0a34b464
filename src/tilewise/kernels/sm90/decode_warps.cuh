// What a streaming warp of the decode kernel does: item after item of its list.
#pragma once
#include "sm90/decode_merge.cuh"

TILE_DEVICE void stream(const DecodeArgs& args, const TensorMap& mK, const TensorMap& mV, int rank) {
    Loader loader(args, mK, mV, rank);
    loader.start();
    Turn<kStages> turn;
    for (int round = 0; round < args.rounds; round++) {
        const DecodeItem item = Loader::item(args, round, rank);
        if (item.rows == 0 || beyond(args, item)) continue;
        const Span span = span_of(args, item);
        Stream body(args);
        body.begin(item, span);
        const int step = item.step();
        for (int chunk = span.begin / kChunk + item.phase(); chunk * kChunk < span.end && span.end > span.begin; chunk += step, turn.next()) {
            loader.wait(turn);
            body.step(loader, turn.stage, chunk * kChunk, span);
            ptx::sync_warp();  // all lanes are done with it
            loader.ask(turn.stage);
        }
        body.finish();
        if (step > 1) {
            meet(args, item, body, rank);
            hand_in_together(args, item, rank);
        } else {
            store_fragments(args, item, body);
            hand_in_alone(args, item);
        }
    }
}
