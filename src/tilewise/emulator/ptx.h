// What each wrapper of tile/ptx.cuh means, in plain C++, name for name.
#pragma once
#include "emulator/types.h"

namespace emu {
uint32_t swizzled(uint32_t address, uint32_t span);
template <class T> constexpr WgmmaType element_type() {
    return std::is_same_v<T, e4m3> ? WgmmaType::e4m3 : std::is_same_v<T, bf16> ? WgmmaType::bf16 : WgmmaType::half;
}
}

namespace ptx {

// ---- arithmetic -------------------------------------------------------------------------------------------------------
inline float exp2(float x) {
    if (emu::counters) emu::counters->exponentials++;
    float y = ::exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;  // the card's instruction gives no subnormals
}
inline float log2(float x) { return ::log2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float mad(float a, float b, float c) {
    emu::count_scalar_flops(2);
    return ::fmaf(a, b, c);
}
inline uint32_t multiply_high(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline int dp4a(int a, int b, int c) {
    emu::count_scalar_flops(8);
    for (int i = 0; i < 4; i++) c += int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
    return c;
}
// To nearest, ties to even, in units of the last of three bits of mantissa, 2^-9 for what is below 2^-6.
inline uint32_t pack_e4m3(float a, float b, float c, float d) {
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
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t which) {
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) word |= uint32_t(uint8_t((uint64_t(b) << 32 | a) >> (which >> (4 * i) & 7) * 8)) << (8 * i);
    return word;
}
inline uint32_t to_tf32(float x) { return (as_bits(x) + 0x1000) & ~0x1fffu; }  // to nearest, ties away

// ---- shared memory and threads ----------------------------------------------------------------------------------------
inline uint32_t shared_address(uint32_t offset) { return offset; }
inline void sync_threads() {
    emu::barrier_sync(0, int(blockDim.x * blockDim.y * blockDim.z));
}
inline void sync_warp() {
    int slot = 0;
    emu::meet(slot, "__syncwarp", [](int* const*) {});
}
inline void barrier_sync(int id, int threads) { emu::barrier_sync(id, threads); }
inline void barrier_arrive(int id, int threads) { emu::barrier_arrive(id, threads); }
inline bool elect_one() { return emu::self().lane == 0; }
template <int kRegisters> void give_registers() {}
template <int kRegisters> void take_registers() {}

// ---- lanes of a warp --------------------------------------------------------------------------------------------------
template <class T> T shuffle(T x, int lane) {
    struct Slot { T in, out; int lane; } s{x, x, lane};
    emu::meet(s, "shuffle", [](Slot* const* lanes) {
        for (int l = 0; l < 32; l++) lanes[l]->out = lanes[lanes[l]->lane & 31]->in;
    });
    return s.out;
}
template <class T> T shuffle_xor(T x, int mask) { return shuffle(x, emu::self().lane ^ mask); }
inline uint32_t uniform(uint32_t x) { return x; }
inline int just_in_time(int x) { return x; }
inline uint32_t ballot(bool x) {
    struct Slot { bool in; uint32_t out; } s{x, 0};
    emu::meet(s, "vote", [](Slot* const* lanes) {
        uint32_t votes = 0;
        for (int l = 0; l < 32; l++) votes |= uint32_t(lanes[l]->in) << l;
        for (int l = 0; l < 32; l++) lanes[l]->out = votes;
    });
    return s.out;
}
inline bool any(bool x) { return ballot(x) != 0; }
inline bool all(bool x) { return ballot(x) == ~0u; }

// ---- atomics ----------------------------------------------------------------------------------------------------------
inline int atomic_add(int* p, int x) {
    emu::check_global(p, 4, emu::Access::atomic);
    return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);
}
inline int atomic_add_shared(uint32_t address, int x) {  // a block's threads take turns
    int& at = *static_cast<int*>(static_cast<void*>(emu::shared_at(address, 4)));
    at += x;
    return at - x;
}
inline uint32_t count_up(uint32_t* p, uint32_t last) {
    emu::check_global(p, 4, emu::Access::atomic);
    uint32_t before = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &before, before >= last ? 0 : before + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
    return before;
}
template <class T> T load_acquire(const T* p) {
    emu::check_global(p, 4, emu::Access::load);
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline uint32_t load_relaxed(const uint32_t* p) { return load_acquire(p); }
inline void spin() { emu::yield(); }

// ---- ldmatrix, stmatrix -----------------------------------------------------------------------------------------------
struct MatrixSlot { uint32_t address; uint32_t* r; };
inline void matrix_rows(MatrixSlot* const* lanes) {
    for (int m = 0; m < 4; m++) {
        uint32_t rows[8];
        for (int i = 0; i < 8; i++) {
            rows[i] = lanes[m * 8 + i]->address;
            emu::check_shared(rows[i], 16);
        }
        emu::count_matrix(rows);
    }
}
// Value (row, column) of matrix m is half h of register m of lane row · 4 + column / 2; transposed, row and column change places.
template <bool kTransposed> void ldmatrix_as(uint32_t (&r)[4], uint32_t address, const char* what) {
    MatrixSlot s{address, r};
    emu::meet(s, what, [](MatrixSlot* const* lanes) {
        matrix_rows(lanes);
        for (int l = 0; l < 32; l++)
            for (int m = 0; m < 4; m++) {
                uint16_t pair[2];
                for (int h = 0; h < 2; h++) {
                    int row = l / 4, column = l % 4 * 2 + h;
                    if (kTransposed) std::swap(row, column);
                    std::memcpy(&pair[h], emu::self().shared + lanes[m * 8 + row]->address + column * 2, 2);
                }
                lanes[l]->r[m] = pair[0] | uint32_t(pair[1]) << 16;
            }
    });
}
inline void ldmatrix(uint32_t (&r)[4], uint32_t address) { ldmatrix_as<false>(r, address, "ldmatrix"); }
inline void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) { ldmatrix_as<true>(r, address, "ldmatrix.trans"); }
inline void stmatrix(uint32_t address, const uint32_t (&r)[4]) {
    MatrixSlot s{address, const_cast<uint32_t*>(r)};
    emu::meet(s, "stmatrix", [](MatrixSlot* const* lanes) {
        matrix_rows(lanes);
        for (int l = 0; l < 32; l++)
            for (int m = 0; m < 4; m++)
                std::memcpy(emu::self().shared + lanes[m * 8 + l / 4]->address + l % 4 * 4, &lanes[l]->r[m], 4);
    });
}

// ---- mma.sync: lane l holds rows l / 4 and l / 4 + 8 of a and d, column l / 4 of b ------------------------------------------
template <class D> struct MmaSlot { D* d; const uint32_t* a; uint32_t b[2]; };
// K values of a row, kPerRegister in each register; a(register, i) and b(register, i) say what a register holds.
template <int K, int kPerRegister, class D, class Value> void mma(D (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char* what, Value value) {
    MmaSlot<D> s{d, a, {b0, b1}};
    emu::meet(s, what, [&](MmaSlot<D>* const* lanes) {
        using V = decltype(value(0u, 0));
        V A[16][K], B[8][K];
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < kPerRegister; i++) {
                int k = l % 4 * kPerRegister + i;
                for (int r = 0; r < 4; r++) A[l / 4 + 8 * (r % 2)][k + K / 2 * (r / 2)] = value(lanes[l]->a[r], i);
                for (int r = 0; r < 2; r++) B[l / 4][k + K / 2 * r] = value(lanes[l]->b[r], i);
            }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                int m = l / 4 + 8 * (i / 2), n = l % 4 * 2 + i % 2;
                D sum = 0;
                for (int k = 0; k < K; k++) sum += D(A[m][k]) * D(B[n][k]);
                lanes[l]->d[i] += sum;
            }
        if (emu::counters) emu::counters->tensor_flops += 2ull * 16 * 8 * K;
    });
}
template <class T> void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma<16, 2>(d, a, b0, b1, "mma.m16n8k16", [](uint32_t r, int i) { return unpack<T>(r, i); });
}
inline void mma_16x8x8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma<8, 1>(d, a, b0, b1, "mma.m16n8k8.tf32", [](uint32_t r, int) { return as_float(r & ~0x1fffu); });
}
inline void mma_16x8x32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma<32, 4>(d, a, b0, b1, "mma.m16n8k32.e4m3", [](uint32_t r, int i) { return to_float(e4m3{uint8_t(r >> (8 * i))}); });
}
inline void mma_16x8x32_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma<32, 4>(d, a, b0, b1, "mma.m16n8k32.s8", [](uint32_t r, int i) { return int(int8_t(r >> (8 * i))); });
}

// ---- cp.async -----------------------------------------------------------------------------------------------------------
inline void copy_async_16(uint32_t to, const void* from, int bytes) {
    struct Copy { uint8_t* to; const void* from; int bytes; };
    if (bytes) emu::check_global(from, size_t(bytes) == 16 ? 16 : 1, emu::Access::load);
    if (emu::counters) {
        emu::counters->async_bytes += uint64_t(bytes);
        if (bytes) emu::count_global(from, size_t(bytes));
    }
    Copy c{emu::shared_at(to, 16), from, bytes};
    emu::async_copy([](void* p) {
        Copy* copy = static_cast<Copy*>(p);
        if (copy->bytes) std::memcpy(copy->to, copy->from, size_t(copy->bytes));
        std::memset(copy->to + copy->bytes, 0, size_t(16 - copy->bytes));
    }, &c, sizeof c);
}
inline void copy_async_commit() { emu::async_copy_commit(); }
template <int kGroupsLeft> void copy_async_wait() { emu::async_copy_wait(kGroupsLeft); }

// ---- mbarriers ----------------------------------------------------------------------------------------------------------
inline void mbarrier_init(uint32_t address, int arrivals) { emu::mbarrier_init(address, arrivals); }
inline void mbarrier_arrive(uint32_t address) { emu::mbarrier_arrive(address, 1); }
inline void mbarrier_arrive_expect(uint32_t address, int bytes) { emu::mbarrier_expect_tx(address, bytes); }
inline void mbarrier_wait(uint32_t address, int parity) { emu::mbarrier_wait(address, parity); }
inline void fence_mbarrier_init() {}
inline void fence_async_proxy() {}

// ---- TMA ------------------------------------------------------------------------------------------------------------------
struct Box { uint32_t shared; const TensorMap* map; uint32_t barrier; int at[5]; };
// Every element of a box, with its place in shared memory and in the tensor (null outside it).
template <class F> void walk_box(const Box& box, F each) {
    const TensorMap& m = *box.map;
    uint32_t count = 1;
    for (uint32_t d = 0; d < m.rank; d++) count *= m.box[d];
    for (uint32_t n = 0; n < count; n++) {
        uint8_t* global = m.base;
        bool inside = true;
        for (uint32_t d = 0, rest = n; d < m.rank; rest /= m.box[d], d++) {
            int64_t i = box.at[d] + int64_t(rest % m.box[d]);
            inside &= i >= 0 && uint64_t(i) < m.size[d];
            global += d ? i * int64_t(m.stride[d - 1]) : i * int64_t(m.element_bytes);
        }
        uint32_t address = emu::swizzled(box.shared + n * m.element_bytes, m.swizzle);
        each(emu::shared_at(address, m.element_bytes), inside ? global : nullptr, m.element_bytes);
    }
    if (emu::counters) emu::counters->async_bytes += uint64_t(count) * m.element_bytes;
}
inline uint32_t box_bytes(const TensorMap& m) {
    uint32_t bytes = m.element_bytes;
    for (uint32_t d = 0; d < m.rank; d++) bytes *= m.box[d];
    return bytes;
}
template <class... At> void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, At... at) {
    if (sizeof...(at) != map->rank) emu::fail("tma_load with %zu coordinates of a tensor map of rank %u", sizeof...(at), map->rank);
    if (to % 128) emu::fail("tma_load to shared offset %u, which is not aligned to 128 bytes", to);
    Box box{to, map, barrier, {at...}};
    emu::bulk_copy([](void* p) {
        Box* b = static_cast<Box*>(p);
        walk_box(*b, [](uint8_t* shared, const uint8_t* global, uint32_t size) {
            if (global) std::memcpy(shared, global, size);
            else std::memset(shared, 0, size);
        });
        emu::mbarrier_complete_tx(b->barrier, int(box_bytes(*b->map)));
    }, &box, sizeof box);
}
template <class... At> void tma_store(const TensorMap* map, uint32_t from, At... at) {
    if (sizeof...(at) != map->rank) emu::fail("tma_store with %zu coordinates of a tensor map of rank %u", sizeof...(at), map->rank);
    if (((at < 0) || ...)) emu::fail("tma_store at a negative coordinate, which a card refuses as an illegal instruction");
    Box box{from, map, 0, {at...}};
    emu::bulk_store([](void* p) {
        walk_box(*static_cast<Box*>(p), [](uint8_t* shared, uint8_t* global, uint32_t size) {
            if (global) std::memcpy(global, shared, size);
        });
    }, &box, sizeof box);
}
inline void prefetch_tensor_map(const TensorMap*) {}
inline void bulk_commit() { emu::bulk_commit(); }
template <int kGroupsLeft> void bulk_wait() { emu::bulk_wait(kGroupsLeft); }
template <int kGroupsLeft> void bulk_wait_read() { emu::bulk_wait(kGroupsLeft); }
inline void let_dependents_start() {}
inline void wait_for_prerequisites() {}

// ---- wgmma ------------------------------------------------------------------------------------------------------------------
inline void wgmma_fence() {}
inline void wgmma_commit() { emu::wgmma_commit(); }
template <int kGroupsLeft> void wgmma_wait() { emu::wgmma_wait(kGroupsLeft); }
template <class T, int N> struct Wgmma {
    template <bool kAMnMajor, bool kBMnMajor> static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
        emu::wgmma_issue({d, {}, a, b, N, false, kAMnMajor, kBMnMajor, accumulate, emu::element_type<T>()});
    }
    template <bool kBMnMajor> static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        emu::wgmma_issue({d, {a[0], a[1], a[2], a[3]}, 0, b, N, true, false, kBMnMajor, accumulate, emu::element_type<T>()});
    }
};

// ---- arithmetic that must round as it stands ----------------------------------------------------------------------------------
inline float multiply(float a, float b) {
    volatile float product = a * b;  // or g++ would fuse it
    return product;
}

// ---- for decode: lanes trade an 8 × 8 matrix, halves are subtracted, bytes copied in bulk, blocks read what others wrote ------------
inline uint32_t transpose_matrix(uint32_t x) {
    struct Slot { uint32_t in, out; } s{x, 0};
    emu::meet(s, "movmatrix", [](Slot* const* lanes) {
        for (int l = 0; l < 32; l++)
            for (int h = 0; h < 2; h++) {
                const int row = l % 4 * 2 + h, column = l / 4;
                lanes[l]->out |= (lanes[row * 4 + column / 2]->in >> (16 * (column % 2)) & 0xffffu) << (16 * h);
            }
    });
    return s.out;
}
inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
    return pack<half>(unpack<half>(a, 0) - unpack<half>(b, 0), unpack<half>(a, 1) - unpack<half>(b, 1));
}
template <bool kHigh> uint32_t e4m3_to_halves(uint32_t x) {
    const uint32_t pair = kHigh ? x >> 16 : x;
    return pack<half>(to_float(e4m3{uint8_t(pair)}), to_float(e4m3{uint8_t(pair >> 8)}));
}
inline uint32_t max_pairs(uint32_t a, uint32_t b) {
    const auto larger = [&](int by) { return uint32_t(uint16_t(int16_t(a >> by) > int16_t(b >> by) ? a >> by : b >> by)) << by; };
    return larger(0) | larger(16);
}
template <class T> uint32_t load_shared_as(uint32_t address) {
    T x;
    std::memcpy(&x, emu::shared_at(address, sizeof(T)), sizeof(T));
    if (emu::counters) emu::count_shared(address, sizeof(T));
    return x;
}
inline uint32_t load_shared(uint32_t address) { return load_shared_as<uint32_t>(address); }
inline uint32_t load_shared_16(uint32_t address) { return load_shared_as<uint16_t>(address); }
inline bool elect_leader() { return elect_one(); }
inline void touch(const void* p) { emu::check_global(p, 1, emu::Access::load); }
inline void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void load_fresh(float& x, float& y, const float* p) {
    emu::check_global(p, 8, emu::Access::load);
    if (emu::counters) emu::count_global(p, 8);
    x = p[0], y = p[1];
}
inline void load_fresh(float (&x)[4], const float* p) {
    emu::check_global(p, 16, emu::Access::load);
    if (emu::counters) emu::count_global(p, 16);
    std::memcpy(x, p, 16);
}
template <class... At> void tma_load_once(uint32_t to, const TensorMap* map, uint32_t barrier, At... at) { tma_load(to, map, barrier, at...); }

}  // namespace ptx
