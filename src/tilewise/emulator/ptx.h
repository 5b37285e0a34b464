// What each wrapper of tile/ptx.cuh means, in plain C++, name for name.
#pragma once
#include "emulator/types.h"

namespace emu {
template <class T> constexpr Type element_type() {
    return std::is_same_v<T, e4m3> ? Type::e4m3 : std::is_same_v<T, bf16> ? Type::bf16 : Type::half;
}
}  // namespace emu

namespace ptx {

// ---- arithmetic ---------------------------------------------------------------------------------------------------
inline float exp2(float x) {
    if (emu::counters) emu::counters->exponentials++;
    float y = ::exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;  // the card's instruction gives no subnormals
}
inline float exp2_here(float x) { return exp2(x); }
inline float log2(float x) { return ::log2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float mad(float a, float b, float c) {
    emu::count_scalar_flops(2);
    return ::fmaf(a, b, c);
}
inline uint32_t multiply_high(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline void count_carry(uint32_t& count, uint32_t a, uint32_t b) { count += uint32_t((uint64_t(a) + b) >> 32); }
inline int count_bits(uint32_t x) { return __builtin_popcount(x); }
inline int dp4a(int a, int b, int c) {
    emu::count_scalar_flops(8);
    for (int i = 0; i < 4; i++) c += int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
    return c;
}
inline uint32_t pack_e4m3(float a, float b, float c, float d) { return emu::pack_e4m3(a, b, c, d); }
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t which) {
    uint32_t word = 0;
    const uint64_t both = uint64_t(b) << 32 | a;
    for (int i = 0; i < 4; i++) word |= uint32_t(uint8_t(both >> (which >> (4 * i) & 7) * 8)) << (8 * i);
    return word;
}
inline uint32_t to_tf32(float x) { return (as_bits(x) + 0x1000) & ~0x1fffu; }  // to nearest, ties away

// ---- shared memory and threads ------------------------------------------------------------------------------------
inline uint32_t shared_address(uint32_t offset) { return offset; }
inline void sync_threads() {
    emu::barrier_sync(0, int(blockDim.x * blockDim.y * blockDim.z));
}
inline void sync_warp() { emu::sync_warp(); }
inline void barrier_sync(int id, int threads) { emu::barrier_sync(id, threads); }
inline void barrier_arrive(int id, int threads) { emu::barrier_arrive(id, threads); }
inline int barrier_count(int id, int threads, bool x) { return emu::barrier_count(id, threads, x); }
inline bool elect_one() { return emu::self().lane == 0; }
template <int kRegisters> void give_registers() {}
template <int kRegisters> void take_registers() {}

// ---- lanes of a warp ----------------------------------------------------------------------------------------------
template <class T> T shuffle(T x, int lane) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof(T));
    bits = emu::shuffle(bits, lane);
    std::memcpy(&x, &bits, sizeof(T));
    return x;
}
template <class T> T shuffle_xor(T x, int mask) { return shuffle(x, emu::self().lane ^ mask); }
// All lanes of the warp take part, as on a card: a branch that some of them do not take would wait for ever.
inline uint32_t uniform(uint32_t x) {
    const uint32_t first = shuffle(x, 0);
    if (first != x) emu::fail("uniform: lane %d has %u and lane 0 has %u", emu::self().lane, x, first);
    return first;
}
inline int just_in_time(int x) { return x; }
template <int kSize> void settle(float (&)[kSize]) {}
inline uint32_t ballot(bool x) { return emu::ballot(x); }
template <class F> uint32_t reduce(uint32_t x, F join) {
    for (int mask = 1; mask < 32; mask *= 2) x = join(x, shuffle_xor(x, mask));
    return x;
}
inline uint32_t reduce_add(uint32_t x) {
    return reduce(x, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t reduce_max(uint32_t x) {
    return reduce(x, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
inline uint32_t reduce_or(uint32_t x) {
    return reduce(x, [](uint32_t a, uint32_t b) { return a | b; });
}
inline bool any(bool x) { return ballot(x) != 0; }
inline bool all(bool x) { return ballot(x) == ~0u; }

// ---- atomics ------------------------------------------------------------------------------------------------------
inline int atomic_add(int* p, int x) {
    emu::check_global(p, 4, emu::Access::atomic);
    if (emu::self().watched) emu::note_relaxed(p);
    return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);
}
inline void atomic_or(uint32_t* p, uint32_t x) {
    emu::check_global(p, 4, emu::Access::atomic);
    if (emu::self().watched) emu::note_relaxed(p);
    __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST);
}
inline void add_to(float* p, float x) {
    emu::check_global(p, 4, emu::Access::atomic);
    uint32_t before, after;
    __atomic_load(reinterpret_cast<uint32_t*>(p), &before, __ATOMIC_SEQ_CST);
    do after = as_bits(as_float(before) + x);
    while (!__atomic_compare_exchange(reinterpret_cast<uint32_t*>(p), &before, &after, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST));
}
inline void add_to(float* p, const float (&x)[4]) {
    for (int i = 0; i < 4; i++) add_to(p + i, x[i]);
}
EMU_INLINE int atomic_add_shared(uint32_t address, int x) {  // a block's threads take turns
    emu::check_shared(address, 4);
    if (emu::self().watched) emu::note_atomic(address);
    uint8_t* place = emu::mark_stored(address, 4);
    int before, after;
    std::memcpy(&before, place, 4);
    after = before + x;
    std::memcpy(place, &after, 4);
    emu::release();
    return before;
}
EMU_INLINE void count_shared(uint32_t address) { atomic_add_shared(address, 1); }
inline uint32_t count_up(uint32_t* p, uint32_t last) {
    emu::check_global(p, 4, emu::Access::atomic);
    emu::release();
    if (emu::self().watched) emu::note_release(p);
    uint32_t before = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &before, before >= last ? 0 : before + 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {
    }
    return before;
}
template <class T> T load_acquire(const T* p) {
    emu::check_global(p, 4, emu::Access::atomic);
    if (emu::self().watched) emu::note_acquire(p);
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline uint32_t load_relaxed(const uint32_t* p) {
    emu::check_global(p, 4, emu::Access::atomic);
    if (emu::self().watched) emu::note_relaxed_load(p);
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void spin() { emu::yield(); }

// ---- ldmatrix, stmatrix -------------------------------------------------------------------------------------------
EMU_INLINE void ldmatrix(uint32_t (&r)[4], uint32_t address) { emu::ldmatrix(r, address, false); }
EMU_INLINE void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) { emu::ldmatrix(r, address, true); }
EMU_INLINE void stmatrix(uint32_t address, const uint32_t (&r)[4]) { emu::stmatrix(address, r, false); }
EMU_INLINE void stmatrix_transposed(uint32_t address, const uint32_t (&r)[4]) { emu::stmatrix(address, r, true); }

// ---- mma.sync -----------------------------------------------------------------------------------------------------
template <class T> void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emu::mma(d, a, b0, b1, emu::element_type<T>());
}
inline void mma_16x8x8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emu::mma(d, a, b0, b1, emu::Type::tf32);
}
inline void mma_16x8x32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emu::mma(d, a, b0, b1, emu::Type::e4m3);
}
inline void mma_16x8x32_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { emu::mma_s8(d, a, b0, b1); }

// ---- cp.async -----------------------------------------------------------------------------------------------------
EMU_INLINE void copy_async_16(uint32_t to, const void* from, int bytes) {
    if (emu::counters && bytes) emu::count_global(from, size_t(bytes));
    emu::copy_async_16(to, from, bytes);
}
inline void copy_async_commit() { emu::copy_async_commit(); }
template <int kGroupsLeft> void copy_async_wait() { emu::copy_async_wait(kGroupsLeft); }
inline void copy_async_arrive(uint32_t barrier) { emu::copy_async_arrive(barrier); }

// ---- mbarriers ----------------------------------------------------------------------------------------------------
inline void mbarrier_init(uint32_t address, int arrivals) { emu::mbarrier_init(address, arrivals); }
inline void mbarrier_arrive(uint32_t address) { emu::mbarrier_arrive(address, 1); }
inline void mbarrier_arrive_expect(uint32_t address, int bytes) { emu::mbarrier_expect_tx(address, bytes); }
inline void mbarrier_wait(uint32_t address, int parity) { emu::mbarrier_wait(address, parity); }
inline void fence_mbarrier_init() { emu::fence_mbarrier_init(); }
inline void fence_async_proxy() { emu::fence_async_proxy(); }

// ---- TMA ----------------------------------------------------------------------------------------------------------
template <class... At> EMU_INLINE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, At... at) {
    const int places[] = {at...};
    emu::tma_load(to, map, barrier, places, sizeof...(at));
}
template <class... At> EMU_INLINE void tma_load_once(uint32_t to, const TensorMap* map, uint32_t barrier, At... at) {
    tma_load(to, map, barrier, at...);
}
template <class... At> EMU_INLINE void tma_store(const TensorMap* map, uint32_t from, At... at) {
    const int places[] = {at...};
    emu::tma_store(map, from, places, sizeof...(at));
}
inline void prefetch_tensor_map(const TensorMap*) {}
template <class... At> void prefetch_box(const TensorMap*, At...) {}
EMU_INLINE void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    emu::bulk_load(to, from, bytes, barrier);
}
EMU_INLINE void bulk_add(float* to, uint32_t from, int bytes) { emu::bulk_add(to, from, bytes); }
inline void bulk_commit() { emu::bulk_commit(); }
template <int kGroupsLeft> void bulk_wait() { emu::bulk_wait(kGroupsLeft); }
template <int kGroupsLeft> void bulk_wait_read() { emu::bulk_wait(kGroupsLeft); }
inline void let_dependents_start() {}
inline void wait_for_prerequisites() {}

// ---- clusters -----------------------------------------------------------------------------------------------------
inline uint32_t address_in(uint32_t address, int rank) { return emu::address_in(address, rank); }
inline void cluster_arrive() { emu::cluster_arrive(); }
inline void cluster_wait() { emu::cluster_wait(); }
EMU_INLINE void store_async(uint32_t to, float x, uint32_t barrier) { emu::store_async(to, &x, 4, barrier); }
EMU_INLINE void store_async(uint32_t to, float x, float y, uint32_t barrier) {
    const float both[] = {x, y};
    emu::store_async(to, both, 8, barrier);
}

// ---- wgmma --------------------------------------------------------------------------------------------------------
inline void wgmma_fence() { emu::wgmma_fence(); }
inline void wgmma_commit() { emu::wgmma_commit(); }
template <int kGroupsLeft> void wgmma_wait() { emu::wgmma_wait(kGroupsLeft); }
template <class T, int N> struct Wgmma {
    template <bool kAMnMajor, bool kBMnMajor>
    EMU_INLINE static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
        emu::wgmma_issue({d, {}, a, b, N, false, kAMnMajor, kBMnMajor, accumulate, emu::element_type<T>()});
    }
    template <bool kBMnMajor>
    EMU_INLINE static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        emu::wgmma_issue({d, {a[0], a[1], a[2], a[3]}, 0, b, N, true, false, kBMnMajor, accumulate,
                          emu::element_type<T>()});
    }
};

// ---- arithmetic that must round as it stands ----------------------------------------------------------------------
inline float multiply(float a, float b) {
    volatile float product = a * b;  // or g++ would fuse it
    return product;
}

// ---- for decode: lanes trade an 8 × 8 matrix, halves are subtracted, blocks read what others wrote ----------------
inline uint32_t transpose_matrix(uint32_t x) { return emu::transpose_matrix(x); }
inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
    return pack<half>(unpack<half>(a, 0) - unpack<half>(b, 0), unpack<half>(a, 1) - unpack<half>(b, 1));
}
inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
    return pack<half>(unpack<half>(a, 0) * unpack<half>(b, 0), unpack<half>(a, 1) * unpack<half>(b, 1));
}
inline uint32_t mad_halves(uint32_t a, uint32_t b, uint32_t c) {
    const auto mad = [&](int i) { return unpack<half>(a, i) * unpack<half>(b, i) + unpack<half>(c, i); };
    return pack<half>(mad(0), mad(1));
}
template <bool kHigh> uint32_t e4m3_to_halves(uint32_t x) {
    const uint32_t pair = kHigh ? x >> 16 : x;
    return pack<half>(to_float(e4m3{uint8_t(pair)}), to_float(e4m3{uint8_t(pair >> 8)}));
}
inline uint32_t max_pairs(uint32_t a, uint32_t b) {
    const auto larger = [&](int by) {
        return uint32_t(uint16_t(int16_t(a >> by) > int16_t(b >> by) ? a >> by : b >> by)) << by;
    };
    return larger(0) | larger(16);
}
template <class T> EMU_INLINE uint32_t load_shared_as(uint32_t address) {
    T x;
    std::memcpy(&x, emu::shared_load(address, sizeof(T)), sizeof(T));
    emu::note_matrix_load(address);
    if (emu::counters) emu::count_shared(address, sizeof(T));
    return x;
}
EMU_INLINE uint32_t load_shared(uint32_t address) { return load_shared_as<uint32_t>(address); }
EMU_INLINE uint32_t load_shared_here(uint32_t address) { return load_shared(address); }
EMU_INLINE uint32_t load_shared_16(uint32_t address) { return load_shared_as<uint16_t>(address); }
inline bool elect_leader() { return elect_one(); }
inline void touch(const void* p) { emu::check_global(p, 1, emu::Access::load); }
inline void fence_device() {
    emu::release();
    if (emu::self().watched) emu::note_fence();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
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
inline void load_kept(uint32_t (&x)[4], const void* p) {
    emu::check_global(p, 16, emu::Access::load);
    if (emu::counters) emu::count_global(p, 16);
    std::memcpy(x, p, 16);
}
inline void store_kept(void* p, const uint32_t (&x)[4]) {
    emu::check_store(p, x, 16);
    if (emu::counters) emu::count_global(p, 16);
    std::memcpy(p, x, 16);
}

}  // namespace ptx
