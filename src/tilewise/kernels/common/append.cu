// append: writes the keys and values of new tokens into pages, one launch for both. It applies the rotary embedding to
// K (and to Q, in place) and converts to the storage format. Every byte is what KVFormat.encode makes on a CPU: each
// product and each quotient is rounded by itself, as torch rounds it.
//
// A row is one head of one token. kLanes lanes have kChunks chunks of 8 channels each, so that a 16-bit row of 128
// channels is one 16-byte load by 16 lanes. The rows of a token are neighbours (heads of K, of V, of Q) and share its
// cosines in the L1 cache. Where K and V are one row, there are no rows of V.
#include "common/chunk.cuh"

constexpr int kThreads = 256;
constexpr int kPlain = 0, kFp8 = 1, kInt8 = 2, kInt4 = 3;  // kFormat
constexpr int kUnturned = 0, kInterleaved = 2;             // kRotary; 1: halves
constexpr uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
constexpr float kInt4Limit = 0x1p126f, kMinScale = 0x1p-126f;  // formats.py says why
// Bits of AppendArgs::vectors, which tell where 16-byte accesses are possible: 1, 2, 4: loads of K, V, Q; 8: loads of
// the cosine and sine tables; 16, 32: stores of K, V
constexpr uint32_t kVectorTable = 8;
constexpr int kGroupLanes = 16;           // a scale of a latent row is that of 128 channels
constexpr float kMaxRowScale = 0x1p119f;  // formats.py says why

struct AppendSource {  // (tokens, heads, D): strides in elements, the channels are dense
    void* base;
    int64_t token, head;
};
struct AppendStore {  // (pages, page size, heads, …): strides in elements; codes have one token stride across all pages
    void* codes;
    void* scale;
    void* zero;    // of int4
    void* rotary;  // of a latent row: like codes
    int64_t codes_token, codes_head, scale_page, scale_token, scale_head, rotary_token, rotary_head;
};
struct AppendArgs {
    AppendSource source[3];  // K, V, Q
    AppendStore store[2];    // K, V
    const int64_t* positions;
    const int64_t* index;  // page · page size + offset; negative: padding of a batch, which is not stored
    const void* cos;       // (positions, pairs)
    const void* sin;
    int64_t cos_row, cos_column, sin_row, sin_column;
    // value_dim: of V; of a latent row, how many channels are quantised. stored: 2 for K and V, 1 where both are one
    // row. first: the channel from which on K and Q turn
    int tokens, heads, heads_q, head_dim, value_dim, stored, first, pairs, page_size, page_shift, group_lanes;
    uint32_t vectors;
};

// x / by for by > 0 and many x, rounded as a division: two Newton steps on the quotient are exact where nothing under-
// or overflows. They would turn −0 / by into +0, so the sign is copied from x.
struct Division {
    float by, reciprocal;
    bool usual;
    TILE_DEVICE explicit Division(float s) : by(s), reciprocal(1.0f / s), usual(s >= 0x1p-60f && s <= 0x1p60f) {}
    TILE_DEVICE float operator()(float x) const {
        if (!usual) return x / by;
        float q = ptx::multiply(x, reciprocal);
        q = ptx::mad(ptx::mad(-by, q, x), reciprocal, q);
        q = ptx::mad(ptx::mad(-by, q, x), reciprocal, q);
        return as_float((as_bits(q) & 0x7fffffffu) | (as_bits(x) & 0x80000000u));
    }
};

// e4m3 of |x| <= 448, to nearest, ties to even
TILE_DEVICE uint32_t to_e4m3(float x) {
    const uint32_t sign = as_bits(x) >> 24 & 0x80u, bits = as_bits(x) & 0x7fffffffu;
    // Below 2^-6 the steps are 2^-9, those of float32 at 2^14: the sum rounds as it must.
    if (bits < 121u << 23) return sign | (as_bits(as_float(bits) + 16384.0f) - as_bits(16384.0f));
    return sign | (bits - (120u << 23) + 0x7ffffu + (bits >> 20 & 1)) >> 20;
}

// bfloat16 is the upper half of a float32: rounded towards +inf (up) or −inf. x is finite.
template <bool kUp> TILE_DEVICE float round_to_bf16(float x) {
    const uint32_t bits = as_bits(x), cut = bits & 0xffff0000u;
    return as_float(cut != bits && (kUp ? x > 0.0f : x < 0.0f) ? cut + 0x10000u : cut);
}

TILE_DEVICE float clamp(float x, float low, float high) { return fminf(fmaxf(x, low), high); }

// The cosines and sines of a token's position
struct Angles {
    Global<const Table> gCos, gSin;
    int64_t cos_column, sin_column;
    int first, pairs;
    bool vectors;
    // Does a pair lie in the chunk that begins at `channel`?
    TILE_DEVICE bool turns(int channel) const {
        return channel + kChannels > first && channel < first + 2 * pairs;
    }
};

// Rotates the pairs of the chunk that begins at `channel`. Each value needs its partner, which this lane reads again
// from the L1 cache.
TILE_DEVICE void rotate_chunk(Chunk<Element>& x, Global<const Element> gRow, int channel, const Angles& t,
                              bool vectors) {
    float own[kChannels], other[kChannels], cosine[kChannels], sine[kChannels];
#pragma unroll
    for (int i = 0; i < kChannels; i++) own[i] = x.get(i);
    gRow = gRow + t.first;
    channel -= t.first;  // from here on channels count from the first that turns
    // The chunk lies in one half of the channels, and its partners are a chunk of the other half.
    const bool aligned = kRotary != kInterleaved && t.pairs % kChannels == 0 && t.first % kChannels == 0;
    if (aligned) {
        Chunk<Element> partner;
        partner.load(gRow + (channel < t.pairs ? channel + t.pairs : channel - t.pairs), kChannels, vectors);
#pragma unroll
        for (int i = 0; i < kChannels; i++) other[i] = partner.get(i);
    }
    if (aligned && t.vectors) {
        Chunk<Table> c, s;
        const int first = channel < t.pairs ? channel : channel - t.pairs;
        c.load(t.gCos + first, kChannels, true);
        s.load(t.gSin + first, kChannels, true);
#pragma unroll
        for (int i = 0; i < kChannels; i++) cosine[i] = c.get(i), sine[i] = s.get(i);
    }
#pragma unroll
    for (int i = 0; i < kChannels; i++) {
        const int ch = channel + i;
        if (ch < 0 || ch >= 2 * t.pairs) continue;
        const bool first = kRotary == kInterleaved ? ch % 2 == 0 : ch < t.pairs;  // of its pair
        const int pair = kRotary == kInterleaved ? ch / 2 : first ? ch : ch - t.pairs;
        if (kRotary == kInterleaved && t.first % 2 == 0) other[i] = x.get(i ^ 1);
        else if (!aligned)
            other[i] = to_float(Element(gRow[kRotary == kInterleaved ? ch ^ 1 : first ? ch + t.pairs : pair]));
        if (!(aligned && t.vectors)) {
            cosine[i] = to_float(Table(t.gCos[pair * t.cos_column]));
            sine[i] = to_float(Table(t.gSin[pair * t.sin_column]));
        }
        // (a, b) -> (a cos − b sin, a sin + b cos)
        const float straight = ptx::multiply(own[i], cosine[i]), across = ptx::multiply(other[i], sine[i]);
        own[i] = first ? straight - across : across + straight;
    }
    x.set(own);
}

// Stores codes of one byte, e4m3 or int8, and one scale per row
TILE_DEVICE void store_codes(const Chunk<Element> (&x)[kChunks], int lane, int head_dim, Global<uint8_t> gCodes,
                             Global<float> gScale, bool there, bool vectors) {
    uint32_t amax = 0;  // |x| as bits, which order as the numbers do, infinity and NaN above all
#pragma unroll
    for (int c = 0; c < kChunks; c++)
#pragma unroll
        for (int i = 0; i < kChannels; i++) {
            const uint32_t bits = as_bits(x[c].get(i)) & 0x7fffffffu;
            amax = bits > amax ? bits : amax;
        }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
        const uint32_t bits = ptx::shuffle_xor(amax, mask);
        amax = bits > amax ? bits : amax;
    }
    const bool finite = amax < kInfinity;
    const float scale = clamp(as_float(amax) / kTop, kMinScale, kMaxScale);
    const Division steps(scale);
    if (!there) return;
    if (lane == 0) gScale[0] = finite ? scale : as_float(kNan);
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int channel = (c * kLanes + lane) * kChannels, count = head_dim - channel;
        uint32_t word[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < kChannels; i++) {
            const float step = clamp(steps(x[c].get(i)), -kTop, kTop);
            uint32_t code;
            if constexpr (kFormat == kFp8) code = finite ? to_e4m3(step) : 0x7fu;
            else code = finite ? uint32_t(int(rintf(step))) & 0xffu : 0u;
            word[i / 4] |= code << (i % 4 * 8);
        }
        if (vectors && count >= kChannels) {
            (gCodes + channel).template as<Vector8>()[0] = Vector8{{word[0], word[1]}};
            continue;
        }
#pragma unroll
        for (int i = 0; i < kChannels; i++)
            if (i < count) gCodes[channel + i] = uint8_t(word[i / 4] >> (i % 4 * 8));
    }
}

// Stores a latent row: codes of one byte for the first `latent` channels, a scale for each 128 of them, and the other
// channels as bfloat16
TILE_DEVICE void store_row(const Chunk<Element> (&x)[kChunks], int lane, int head_dim, int latent,
                           Global<uint8_t> gCodes, Global<float> gScale, Global<bf16> gRotary, bool there,
                           bool vectors) {
    uint32_t amax[kChunks];  // |x| as bits
    int finite = 1;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int channel = (c * kLanes + lane) * kChannels;
        amax[c] = 0;
#pragma unroll
        for (int i = 0; i < kChannels; i++) {
            const uint32_t bits = as_bits(x[c].get(i)) & 0x7fffffffu;
            if (bits >= kInfinity) finite = 0;
            if (channel + i < latent && bits > amax[c]) amax[c] = bits;
        }
#pragma unroll
        for (int mask = 1; mask < kGroupLanes && mask < kLanes; mask *= 2) {
            const uint32_t bits = ptx::shuffle_xor(amax[c], mask);
            amax[c] = bits > amax[c] ? bits : amax[c];
        }
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) finite &= ptx::shuffle_xor(finite, mask);
    if (!there) return;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int chunk = c * kLanes + lane, channel = chunk * kChannels, count = head_dim - channel;
        if (count <= 0) continue;
        float scale = clamp(as_float(amax[c]) / kTop, kMinScale, kMaxScale);
        // The next power of two: a carry out of the mantissa, unless that is 0, into the exponent
        if (kFormat == kFp8) scale = fminf(as_float((as_bits(scale) + 0x7fffffu) & kInfinity), kMaxRowScale);
        if (chunk % kGroupLanes == 0 && channel < latent)
            gScale[chunk / kGroupLanes] = finite ? scale : as_float(kNan);
        const Division steps(scale);
        uint32_t word[2] = {0, 0};
        float values[kChannels];
#pragma unroll
        for (int i = 0; i < kChannels; i++) {
            values[i] = finite ? x[c].get(i) : as_float(kNan);
            const float step = clamp(steps(x[c].get(i)), -kTop, kTop);
            uint32_t code;
            if constexpr (kFormat == kFp8) code = finite ? to_e4m3(step) : 0x7fu;
            else code = finite ? uint32_t(int(rintf(step))) & 0xffu : 0u;
            word[i / 4] |= code << (i % 4 * 8);
        }
        if (vectors && channel + kChannels <= latent) {
            (gCodes + channel).template as<Vector8>()[0] = Vector8{{word[0], word[1]}};
            continue;
        }
        if (vectors && channel >= latent && latent % kChannels == 0) {
            Chunk<bf16> y;
            y.set(values);
            y.store(gRotary + (channel - latent), count, true);
            continue;
        }
#pragma unroll
        for (int i = 0; i < kChannels; i++) {
            if (channel + i < latent) gCodes[channel + i] = uint8_t(word[i / 4] >> (i % 4 * 8));
            else if (i < count) gRotary[channel + i - latent] = from_float<bf16>(values[i]);
        }
    }
}

// Stores codes of four bits, and a scale and a zero point per group of channels. A chunk lies in one group.
TILE_DEVICE void store_nibbles(const Chunk<Element> (&x)[kChunks], int lane, int head_dim, int group_lanes,
                               Global<uint8_t> gCodes, Global<bf16> gScale, Global<bf16> gZero, bool there,
                               bool vectors) {
    float low[kChunks], high[kChunks];
    int finite = 1;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int count = head_dim - (c * kLanes + lane) * kChannels;
        low[c] = INFINITY, high[c] = -INFINITY;
#pragma unroll
        for (int i = 0; i < kChannels; i++)
            if (i < count) {
                const float value = x[c].get(i);
                low[c] = fminf(low[c], value), high[c] = fmaxf(high[c], value);
                if ((as_bits(value) & 0x7fffffffu) >= kInfinity) finite = 0;
            }
        for (int mask = 1; mask < group_lanes && mask < kLanes; mask *= 2) {
            low[c] = fminf(low[c], ptx::shuffle_xor(low[c], mask));
            high[c] = fmaxf(high[c], ptx::shuffle_xor(high[c], mask));
        }
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) finite &= ptx::shuffle_xor(finite, mask);
    if (!there) return;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int chunk = c * kLanes + lane, channel = chunk * kChannels, count = head_dim - channel;
        if (count <= 0) continue;
        // The minimum rounded down (a zero of either sign is +0) and the scale rounded up: the codes cover the group.
        const float zero = round_to_bf16<false>(clamp(low[c], -kInt4Limit, kInt4Limit) + 0.0f);
        const float span = clamp(high[c], -kInt4Limit, kInt4Limit) - zero;
        const float scale = round_to_bf16<true>(fmaxf(span / 15.0f, kMinScale));
        if (chunk % group_lanes == 0) {
            gScale[chunk / group_lanes] = from_float<bf16>(finite ? scale : as_float(kNan));
            gZero[chunk / group_lanes] = from_float<bf16>(finite ? zero : as_float(kNan));
        }
        const Division steps(scale);
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < kChannels; i++)
            if (i < count && finite) word |= uint32_t(clamp(rintf(steps(x[c].get(i) - zero)), 0.0f, 15.0f)) << (4 * i);
        if (vectors && count >= kChannels) {
            (gCodes + channel / 2).template as<uint32_t>()[0] = word;
            continue;
        }
#pragma unroll
        for (int i = 0; i < kChannels; i += 2)
            if (i < count) gCodes[(channel + i) / 2] = uint8_t(word >> (4 * i));
    }
}

// Stores a row as the plain dtype Stored; where that is the dtype given, the bits stay as they are.
template <class T> struct Plain {
    TILE_DEVICE static void store(const Chunk<Element>& x, Global<T> g, int count, bool vectors) {
        Chunk<T> y;
        float values[kChannels];
#pragma unroll
        for (int i = 0; i < kChannels; i++) values[i] = x.get(i);
        y.set(values);
        y.store(g, count, vectors);
    }
};
template <> struct Plain<Element> {
    TILE_DEVICE static void store(const Chunk<Element>& x, Global<Element> g, int count, bool vectors) {
        x.store(g, count, vectors);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 3) append(const __grid_constant__ AppendArgs a) {
    const int lane = threadIdx.x % kLanes;
    const uint32_t row = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
    const uint32_t written = a.stored * a.heads, rows = written + a.heads_q, token = row / rows, place = row % rows;
    const int kind = place >= written ? 2 : place < uint32_t(a.heads) ? 0 : 1;
    const int head = int(place) - (kind == 2 ? a.stored : kind) * a.heads;
    const int width = kind == 1 ? a.value_dim : a.head_dim;
    const bool inside = token < uint32_t(a.tokens);

    // The values are loaded without waiting for the index, so padding is read too.
    const AppendSource& source = a.source[kind];
    const Global<Element> gRow{static_cast<Element*>(source.base) + token * source.token + head * source.head};
    const Global<const Element> gIn{gRow.base};
    const bool vectors = a.vectors >> kind & 1;
    Chunk<Element> x[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int channel = (c * kLanes + lane) * kChannels;
        x[c].load(gIn + channel, inside ? width - channel : 0, vectors);
    }
    const int64_t index = inside ? int64_t(Global<const int64_t>{a.index}[token]) : -1;
    const bool there = index >= 0;

    Angles angles{{nullptr}, {nullptr}, a.cos_column, a.sin_column, a.first, a.pairs, (a.vectors & kVectorTable) != 0};
    if (kRotary != kUnturned && kind != 1 && there) {
        const int64_t position = Global<const int64_t>{a.positions}[token];
        angles.gCos = {static_cast<const Table*>(a.cos) + position * a.cos_row};
        angles.gSin = {static_cast<const Table*>(a.sin) + position * a.sin_row};
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            const int channel = (c * kLanes + lane) * kChannels;
            if (angles.turns(channel)) rotate_chunk(x[c], gIn, channel, angles, vectors);
        }
    }
    if (a.heads_q) {
        ptx::sync_warp();  // Q is rotated in place: all lanes of a row have read their partners
        if (kind == 2 && there) {
#pragma unroll
            for (int c = 0; c < kChunks; c++) {
                const int channel = (c * kLanes + lane) * kChannels;
                if (angles.turns(channel)) x[c].store(gRow + channel, a.head_dim - channel, vectors);
            }
        }
    }

    const AppendStore& store = a.store[kind == 1];
    const bool stored = there && kind < 2, vector_store = a.vectors >> (4 + kind) & 1;
    const int64_t codes = index * store.codes_token + head * store.codes_head;
    if constexpr (kFormat == kPlain) {
        if (!stored) return;
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            const int channel = (c * kLanes + lane) * kChannels;
            const Global<Stored> gOut{static_cast<Stored*>(store.codes) + codes + channel};
            if (channel < width) Plain<Stored>::store(x[c], gOut, width - channel, vector_store);
        }
    } else {
        const int64_t page = a.page_shift >= 0 ? index >> a.page_shift : index / a.page_size;
        const int64_t at =
            page * store.scale_page + (index - page * a.page_size) * store.scale_token + head * store.scale_head;
        const Global<uint8_t> gCodes{static_cast<uint8_t*>(store.codes) + codes};
        if constexpr (kLatentRow) {
            const int64_t rotary = index * store.rotary_token + head * store.rotary_head;
            store_row(x, lane, a.head_dim, a.value_dim, gCodes, {static_cast<float*>(store.scale) + at},
                      {static_cast<bf16*>(store.rotary) + rotary}, stored, vector_store);
        } else if constexpr (kFormat == kInt4)
            store_nibbles(x, lane, width, a.group_lanes, gCodes, {static_cast<bf16*>(store.scale) + at},
                          {static_cast<bf16*>(store.zero) + at}, stored, vector_store);
        else
            store_codes(x, lane, width, gCodes, {static_cast<float*>(store.scale) + at}, stored, vector_store);
    }
}
