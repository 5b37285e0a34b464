// The tile of query rows of a head that a block of the kernels before and after the backward takes: its number is the
// block's, of packed sequences a slot (arguments.cuh). Constants: Index, of the starts; kTileQ, kPacked.
#pragma once
#include "backward/arguments.cuh"

// A tile of query rows: `rows` of them, from `first` on. outside: rows that are no sequence's are some, too
struct QueryTile {
    int head, batch, first, rows;
    int64_t number;  // among those of all heads
    TILE_DEVICE QueryTile(const BackwardArgs& args, bool outside) : number(blockIdx.x) {
        const int of_heads = blockIdx.x / args.q_tiles, slot = blockIdx.x - of_heads * args.q_tiles;
        batch = of_heads / args.heads;
        head = of_heads - batch * args.heads;
        first = slot * kTileQ;
        rows = args.seqlen_q - first;
        if constexpr (kPacked) find(args, slot, outside);
    }
    // The sequence whose tiles have this slot, by all lanes together: 32 candidates in a round
    TILE_DEVICE void find(const BackwardArgs& args, int slot, bool outside) {
        const Global<const Index> starts{static_cast<const Index*>(args.starts_q)};
        int low = outside ? -1 : 0, high = args.sequences + outside;  // it is in [low, high)
        while (high - low > 1) {
            const int step = (high - low + 31) / 32, candidate = low + step * (threadIdx.x % 32);
            const bool before = candidate < high && slot_of(starts, args, candidate) <= slot;
            const int found = ptx::count_bits(ptx::ballot(before));
            if (found > 1) low += step * (found - 1);
            high = low + step < high ? low + step : high;
        }
        const int start = start_at(starts, args, low), length = start_at(starts, args, low + 1) - start;
        const int row = (slot - slot_of(starts, args, low)) * kTileQ;
        first = start + row;
        rows = row < 0 ? 0 : length - row;
    }
    static TILE_DEVICE int slot_of(const Global<const Index>& starts, const BackwardArgs& args, int sequence) {
        return first_slot<kTileQ>(start_at(starts, args, sequence), sequence);
    }
    // Whatever the starts say, no row lies outside the tensors.
    static TILE_DEVICE int start_at(const Global<const Index>& starts, const BackwardArgs& args, int sequence) {
        if (sequence < 0) return 0;
        const int64_t start = sequence > args.sequences ? args.seqlen_q : int64_t(starts[sequence]);
        return start < 0 ? 0 : start > args.seqlen_q ? args.seqlen_q : int(start);
    }
};
