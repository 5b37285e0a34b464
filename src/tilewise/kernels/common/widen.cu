// widen: pages of K and V in any storage format, copied as pages of plain numbers, for kernels that read no others.
// Every value is what KVFormat.decode makes on a CPU: each product and each sum is rounded by itself.
//
// A row is one head of one token. kLanes lanes have kChunks chunks of 8 channels each; the heads of a token are
// neighbours, as they are in memory. Where K and V are one row, there are no rows of V.
#include "common/chunk.cuh"
#include "tile/quant.cuh"

constexpr int kThreads = 256;
constexpr int kPlain = 0, kFp8 = 1, kInt8 = 2;  // kFormat; 3: int4
constexpr int kGroupLanes = 16;                 // a scale of a latent row is that of 128 channels

struct WidenStore {  // (pages, page size, heads, …): strides in elements, the channels are dense
    const void* codes;
    const void* scale;
    const void* zero;    // of int4
    const void* rotary;  // of a latent row
    int64_t codes_page, codes_token, codes_head, scale_page, scale_token, scale_head;
    int64_t rotary_page, rotary_token, rotary_head;
};
struct WidenArgs {
    WidenStore store[2];  // K, V
    void* out[2];         // (count, page size, heads, head_dim or value_dim), dense
    const int* pages;     // (count,)
    int64_t rows;         // of K, and as many of V
    // value_dim: of V; of a latent row, how many channels are quantised. stored: 2 for K and V, 1 where both are one
    // row
    int page_size, heads, head_dim, value_dim, stored, group_lanes;
    uint32_t vectors;  // 1, 2: eight channels of K, of V are loaded at once; 4, 8: and stored
};

// Eight codes as numbers, without scale and zero
TILE_DEVICE void load_codes(float (&x)[kChannels], Global<const uint8_t> g, int count, bool vectors) {
    constexpr int kBytes = kFormat == kFp8 || kFormat == kInt8 ? kChannels : kChannels / 2;
    uint32_t word[2] = {0, 0};
    if (vectors && count >= kChannels) {
        if constexpr (kBytes == kChannels) {
            const Vector8 both = g.template as<const Vector8>()[0];
            word[0] = both.word[0], word[1] = both.word[1];
        } else word[0] = g.template as<const uint32_t>()[0];
    } else {
#pragma unroll
        for (int i = 0; i < kBytes; i++)
            if (i * kChannels / kBytes < count) word[i / 4] |= uint32_t(uint8_t(g[i])) << (i % 4 * 8);
    }
#pragma unroll
    for (int i = 0; i < kChannels; i++) {
        if constexpr (kFormat == kFp8) {
            const uint32_t pair = i % 4 < 2 ? quant::from_fp8<false>(word[i / 4]) : quant::from_fp8<true>(word[i / 4]);
            x[i] = unpack<half>(pair, i % 2);
        } else if constexpr (kFormat == kInt8) x[i] = float(int8_t(word[i / 4] >> (i % 4 * 8)));
        else x[i] = float(word[0] >> (4 * i) & 15u);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) widen(const __grid_constant__ WidenArgs a) {
    const int lane = threadIdx.x % kLanes;
    int64_t row = int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    const int which = row >= a.rows, width = which ? a.value_dim : a.head_dim;
    row -= which * a.rows;
    if (which >= a.stored || row >= a.rows) return;
    const int64_t token = row / a.heads, place = token / a.page_size;
    const int head = int(row - token * a.heads), in_page = int(token - place * a.page_size);
    const WidenStore& store = a.store[which];
    const int64_t page = Global<const int>{a.pages}[place];
    const int64_t codes = page * store.codes_page + in_page * store.codes_token + head * store.codes_head;
    const int64_t scales = page * store.scale_page + in_page * store.scale_token + head * store.scale_head;
    const bool vectors = a.vectors >> which & 1;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int chunk = c * kLanes + lane, channel = chunk * kChannels, count = width - channel;
        if (count <= 0) continue;
        float x[kChannels];
        const int latent = kLatentRow ? a.value_dim - channel : count;  // channels that are codes
        if constexpr (kFormat == kPlain) {
            Chunk<Stored> y;
            y.load(Global<const Stored>{static_cast<const Stored*>(store.codes) + codes + channel}, count, vectors);
#pragma unroll
            for (int i = 0; i < kChannels; i++) x[i] = y.get(i);
        } else {
            const Global<const uint8_t> gCodes{static_cast<const uint8_t*>(store.codes) + codes};
            if constexpr (kFormat == kFp8 || kFormat == kInt8) {
                if (latent > 0) {
                    const int64_t group = scales + (kLatentRow ? chunk / kGroupLanes : 0);
                    load_codes(x, gCodes + channel, latent, vectors);
                    const float scale = Global<const float>{static_cast<const float*>(store.scale)}[group];
#pragma unroll
                    for (int i = 0; i < kChannels; i++) x[i] = ptx::multiply(x[i], scale);
                }
                if (kLatentRow && latent < kChannels) {
                    const int64_t rotary =
                        page * store.rotary_page + in_page * store.rotary_token + head * store.rotary_head;
                    const Global<const bf16> gRotary{static_cast<const bf16*>(store.rotary) + rotary - latent};
#pragma unroll
                    for (int i = 0; i < kChannels; i++)
                        if (i >= latent && i < count) x[i] = to_float(bf16(gRotary[i]));
                }
            } else {
                load_codes(x, gCodes + channel / 2, count, vectors);
                const int64_t group = scales + chunk / a.group_lanes;
                const float scale = to_float(bf16(Global<const bf16>{static_cast<const bf16*>(store.scale)}[group]));
                const float zero = to_float(bf16(Global<const bf16>{static_cast<const bf16*>(store.zero)}[group]));
#pragma unroll
                for (int i = 0; i < kChannels; i++) x[i] = ptx::multiply(x[i], scale) + zero;
            }
        }
        Chunk<Element> y;
        y.set(x);
        y.store({static_cast<Element*>(a.out[which]) + row * width + channel}, count, a.vectors >> (2 + which) & 1);
    }
}
