// Which tile of the Hopper forward has which number, one thread per number. Constants: kTileQ, kTileKv, kPack.
#include "prefill/work.cuh"

extern "C" __global__ void order(const ForwardArgs args, int* tiles, int count) {
    for (int number = threadIdx.x; number < count; number += blockDim.x) {
        const WorkTile tile = work_tile<kTileQ, kTileKv, kPack>(args, number);
        const int facts[] = {tile.sequence, tile.head, tile.row, tile.begin, tile.end, tile.kv_head};
        for (int i = 0; i < 6; i++) Global<int>{tiles}[6 * number + i] = facts[i];
    }
}
