// What the lanes of a warp do together: shuffles, votes, ldmatrix, stmatrix, mma.sync.
#include "emulator/runtime/engine.h"

namespace emu {

uint64_t shuffle(uint64_t x, int lane) {
    struct Slot { uint64_t in, out; int lane; } s{x, x, lane};
    meet(s, "shuffle", [](Slot* const* lanes) {
        for (int l = 0; l < 32; l++) lanes[l]->out = lanes[lanes[l]->lane & 31]->in;
    });
    return s.out;
}
uint32_t ballot(bool x) {
    struct Slot { bool in; uint32_t out; } s{x, 0};
    meet(s, "vote", [](Slot* const* lanes) {
        uint32_t votes = 0;
        for (int l = 0; l < 32; l++) votes |= uint32_t(lanes[l]->in) << l;
        for (int l = 0; l < 32; l++) lanes[l]->out = votes;
    });
    return s.out;
}
uint32_t transpose_matrix(uint32_t x) {
    struct Slot { uint32_t in, out; } s{x, 0};
    meet(s, "movmatrix", [](Slot* const* lanes) {
        for (int l = 0; l < 32; l++)
            for (int h = 0; h < 2; h++) {
                const int row = l % 4 * 2 + h, column = l / 4;
                lanes[l]->out |= (lanes[row * 4 + column / 2]->in >> (16 * (column % 2)) & 0xffffu) << (16 * h);
            }
    });
    return s.out;
}

// ---- ldmatrix, stmatrix -------------------------------------------------------------------------------------------
// Lanes meet to trade addresses only. Then each loads or stores its own words when its turn comes: the instruction
// orders no lane's accesses before what another lane does next, and a missing sync_warp shows.
struct MatrixSlot {
    uint32_t address;
    uint32_t word[4];     // where this lane's register m lies; transposed: where its lower half does,
    uint32_t upper[4];    // and where its upper half does
};
static void trade_addresses(MatrixSlot* const* lanes, bool transposed) {
    uint32_t rows[4][8];
    for (int m = 0; m < 4; m++) {
        for (int i = 0; i < 8; i++) {
            rows[m][i] = lanes[m * 8 + i]->address;
            check_shared(rows[m][i], 16);
        }
        count_matrix(rows[m]);
    }
    // Value (row, column) of matrix m is half h of register m of lane row · 4 + column / 2; transposed, row and
    // column change places.
    for (int l = 0; l < 32; l++)
        for (int m = 0; m < 4; m++) {
            lanes[l]->word[m] = transposed ? rows[m][l % 4 * 2] + uint32_t(l / 4 * 2)
                                           : rows[m][l / 4] + uint32_t(l % 4 * 4);
            lanes[l]->upper[m] = rows[m][l % 4 * 2 + 1] + uint32_t(l / 4 * 2);
        }
}
void ldmatrix(uint32_t* r, uint32_t address, bool transposed) {
    MatrixSlot s{address, {}, {}};
    if (transposed) meet(s, "ldmatrix.trans", [](MatrixSlot* const* lanes) { trade_addresses(lanes, true); });
    else meet(s, "ldmatrix", [](MatrixSlot* const* lanes) { trade_addresses(lanes, false); });
    const uint8_t* shared = self().shared;
    if (self().watched)
        for (int m = 0; m < 4; m++) {
            note_load(s.word[m], transposed ? 2 : 4, __builtin_return_address(0));
            if (transposed) note_load(s.upper[m], 2, __builtin_return_address(0));
        }
    for (int m = 0; m < 4; m++)
        if (transposed) {
            uint16_t pair[2];
            std::memcpy(&pair[0], shared + s.word[m], 2);
            std::memcpy(&pair[1], shared + s.upper[m], 2);
            r[m] = pair[0] | uint32_t(pair[1]) << 16;
        } else {
            std::memcpy(&r[m], shared + s.word[m], 4);
        }
    note_matrix_load(address);
}
void stmatrix(uint32_t address, const uint32_t* r, bool transposed) {
    MatrixSlot s{address, {}, {}};
    if (transposed) meet(s, "stmatrix.trans", [](MatrixSlot* const* lanes) { trade_addresses(lanes, true); });
    else meet(s, "stmatrix", [](MatrixSlot* const* lanes) { trade_addresses(lanes, false); });
    const auto store = [line = __builtin_return_address(0)](uint32_t to, const void* from, size_t size) {
        if (self().watched) note_store(to, from, size, line);
        std::memcpy(mark_stored(to, size), from, size);
    };
    for (int m = 0; m < 4; m++)
        if (transposed) {
            const uint16_t pair[2] = {uint16_t(r[m]), uint16_t(r[m] >> 16)};
            store(s.word[m], &pair[0], 2);
            store(s.upper[m], &pair[1], 2);
        } else {
            store(s.word[m], &r[m], 4);
        }
}

// ---- mma.sync: lane l holds rows l / 4 and l / 4 + 8 of a and d, column l / 4 of b --------------------------------
// Tensor cores cut off the digits that a float32 has no room for, towards zero. It shows where products have as many
// digits as a float32; sums of others are rounded here, which is faster.
static float add(float x, double sum) {
    const double exact = x + sum;
    const float y = float(exact);
    return std::fabs(double(y)) > std::fabs(exact) && !std::isinf(y) ? std::nextafter(y, 0.0f) : y;
}
template <class D> static D add(D x, D sum) { return x + sum; }
template <class D> struct MmaSlot { D* d; const uint32_t* a; uint32_t b[2]; };
// K values of a row, kPerRegister in each register; value(register, i) is what a register holds.
// Sum: what a row's products are added up in.
template <int K, int kPerRegister, class Sum, class D, class Value>
static void multiply(D* d, const uint32_t* a, uint32_t b0, uint32_t b1, const char* what, Value value) {
    MmaSlot<D> s{d, a, {b0, b1}};
    meet(s, what, [&](MmaSlot<D>* const* lanes) {
        D A[16][K], B[K][8];
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < kPerRegister; i++) {
                int k = l % 4 * kPerRegister + i;
                for (int r = 0; r < 4; r++) A[l / 4 + 8 * (r % 2)][k + K / 2 * (r / 2)] = D(value(lanes[l]->a[r], i));
                for (int r = 0; r < 2; r++) B[k + K / 2 * r][l / 4] = D(value(lanes[l]->b[r], i));
            }
        for (int m = 0; m < 16; m++) {
            Sum sum[8] = {};
            for (int k = 0; k < K; k++)
                for (int n = 0; n < 8; n++) sum[n] += Sum(A[m][k]) * B[k][n];
            for (int n = 0; n < 8; n++) {
                D& x = lanes[m % 8 * 4 + n / 2]->d[m / 8 * 2 + n % 2];
                x = add(x, sum[n]);
            }
        }
        if (counters) counters->tensor_flops += 2ull * 16 * 8 * K;
    });
}
void mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Type type) {
    switch (type) {
        case Type::half:
            return multiply<16, 2, float>(d, a, b0, b1, "mma.m16n8k16",
                                          [](uint32_t r, int i) { return unpack<half>(r, i); });
        case Type::bf16:
            return multiply<16, 2, float>(d, a, b0, b1, "mma.m16n8k16",
                                          [](uint32_t r, int i) { return unpack<bf16>(r, i); });
        case Type::e4m3:
            return multiply<32, 4, float>(d, a, b0, b1, "mma.m16n8k32.e4m3",
                                          [](uint32_t r, int i) { return to_float(e4m3{uint8_t(r >> (8 * i))}); });
        default:
            return multiply<8, 1, double>(d, a, b0, b1, "mma.m16n8k8.tf32",
                                          [](uint32_t r, int) { return as_float(r & ~0x1fffu); });
    }
}
void mma_s8(int* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
    multiply<32, 4, int>(d, a, b0, b1, "mma.m16n8k32.s8", [](uint32_t r, int i) { return int(int8_t(r >> (8 * i))); });
}

// ---- FP8 ----------------------------------------------------------------------------------------------------------
static constexpr E4m3Values e4m3_values() {
    E4m3Values values{};
    for (int code = 0; code < 256; code++) {
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        float size = float(exponent ? 8 + mantissa : mantissa) / 512;  // in units of 2^-9
        for (int e = 1; e < exponent; e++) size *= 2;
        if ((code & 127) == 127) size = NAN;
        values.of_code[code] = code & 128 ? -size : size;
    }
    return values;
}
const E4m3Values kE4m3 = e4m3_values();

// To nearest, ties to even, in units of the last of three bits of mantissa, 2^-9 for what is below 2^-6.
uint32_t pack_e4m3(float a, float b, float c, float d) {
    uint32_t word = 0;
    const float values[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        const float x = values[i], size = std::fmin(std::fabs(x), 448.0f);
        int exponent = size > 0.0f ? std::max(std::ilogb(size), -6) : -6;
        int steps = int(std::nearbyint(std::ldexp(size, 3 - exponent)));
        if (steps == 16) steps = 8, exponent++;
        const int code = x != x ? 0x7f : steps < 8 ? steps : (exponent + 7) << 3 | (steps - 8);
        word |= uint32_t(code | (std::signbit(x) ? 0x80 : 0)) << (8 * i);
    }
    return word;
}

}  // namespace emu
