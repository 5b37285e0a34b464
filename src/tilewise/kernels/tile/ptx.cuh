// The only file with inline PTX, together with ptx_wgmma.cuh. Each wrapper is one instruction, or a loop that waits
// with one. emulator/ptx.h has the same functions in plain C++, name for name.
#pragma once
#include "tile/types.cuh"
#ifdef TILEWISE_EMULATOR
#include "emulator/ptx.h"
#else

namespace ptx {

// ---- arithmetic -----------------------------------------------------------------------------------------------------
TILE_DEVICE float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The same, and neither moved ahead of what stands before it nor left out
TILE_DEVICE float exp2_here(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TILE_DEVICE float log2(float x) { return __log2f(x); }
// 1 / x, to within the last bit or two; 0 for |x| beyond 2^126
TILE_DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TILE_DEVICE float mad(float a, float b, float c) { return fmaf(a, b, c); }
// The upper half of a 64-bit product
TILE_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
// Adds 1 to `count` if a + b is 2^32 or more. Two carries are added by one instruction.
TILE_DEVICE void count_carry(uint32_t& count, uint32_t a, uint32_t b) {
    asm("{.reg .u32 unused; add.cc.u32 unused, %1, %2; addc.u32 %0, %0, 0;}" : "+r"(count) : "r"(a), "r"(b));
}
// How many bits are 1
TILE_DEVICE int count_bits(uint32_t x) { return __popc(x); }
// c plus the products of the four signed bytes of a and b
TILE_DEVICE int dp4a(int a, int b, int c) { return __dp4a(a, b, c); }
// x rounded to tf32, as the mma wants it
TILE_DEVICE uint32_t to_tf32(float x) {
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}

// Four floats as e4m3, the first in the low byte; what is beyond ±448 becomes ±448.
TILE_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
    uint32_t r = 0;
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high};}"
        : "=r"(r)
        : "f"(a), "f"(b), "f"(c), "f"(d));
#endif
    return r;
}
// Four of the bytes of {a, b}, numbered 0 … 7 from a's lowest on, selected by the four lowest nibbles of `which`
TILE_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t which) { return __byte_perm(a, b, which); }

// ---- shared memory and threads --------------------------------------------------------------------------------------
TILE_DEVICE uint8_t* shared_base() {
    extern __shared__ __align__(1024) uint8_t tilewise_shared[];
    return tilewise_shared;
}
TILE_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
TILE_DEVICE uint32_t shared_address(uint32_t offset) { return shared_address(shared_base()) + offset; }
TILE_DEVICE void sync_threads() { __syncthreads(); }
TILE_DEVICE void sync_warp() { __syncwarp(); }
TILE_DEVICE void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
TILE_DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// barrier_sync, and for how many of the threads x holds
TILE_DEVICE int barrier_count(int id, int threads, bool x) {
    int count;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; bar.red.popc.u32 %0, %1, %2, p;}"
                 : "=r"(count)
                 : "r"(id), "r"(threads), "r"(int(x))
                 : "memory");
    return count;
}
TILE_DEVICE bool elect_one() { return threadIdx.x % 32 == 0; }
template <int kRegisters> TILE_DEVICE void give_registers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters> TILE_DEVICE void take_registers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// ---- lanes of a warp ------------------------------------------------------------------------------------------------
template <class T> TILE_DEVICE T shuffle(T x, int lane) { return __shfl_sync(~0u, x, lane); }
template <class T> TILE_DEVICE T shuffle_xor(T x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
// x, which is the same in all lanes, in a form that tells the compiler so: descriptors made from it stay in uniform
// registers.
TILE_DEVICE uint32_t uniform(uint32_t x) { return __reduce_max_sync(~0u, x); }
// x, hidden from the compiler: what is computed from it cannot be hoisted out of a loop, where it would hold registers.
TILE_DEVICE int just_in_time(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
// The same for values that a product in flight writes: what is computed from them stays behind the wait for it.
template <int kSize> TILE_DEVICE void settle(float (&x)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; i++) asm volatile("" : "+f"(x[i])::"memory");
}
TILE_DEVICE bool any(bool x) { return __any_sync(~0u, x); }
TILE_DEVICE bool all(bool x) { return __all_sync(~0u, x); }
TILE_DEVICE uint32_t ballot(bool x) { return __ballot_sync(~0u, x); }
// The sum, the greatest and the union of the lanes' values, in every lane
TILE_DEVICE uint32_t reduce_add(uint32_t x) { return __reduce_add_sync(~0u, x); }
TILE_DEVICE uint32_t reduce_max(uint32_t x) { return __reduce_max_sync(~0u, x); }
TILE_DEVICE uint32_t reduce_or(uint32_t x) { return __reduce_or_sync(~0u, x); }

// ---- atomics --------------------------------------------------------------------------------------------------------
TILE_DEVICE int atomic_add(int* p, int x) { return atomicAdd(p, x); }
TILE_DEVICE void atomic_or(uint32_t* p, uint32_t x) { atomicOr(p, x); }
// Floats are added, in any order, and nobody asks what was there before: one, or four neighbours on 16 bytes
TILE_DEVICE void add_to(float* p, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory"); }
TILE_DEVICE void add_to(float* p, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#endif
}
// In shared memory, with acquire and release order among the threads that add
TILE_DEVICE int atomic_add_shared(uint32_t address, int x) {
    int before;
    asm volatile("atom.acq_rel.cta.shared.add.s32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(x) : "memory");
    return before;
}
// Counts up by one, from `last` to 0, with release order, and returns the value before. A thread that reads the new
// value and then fences sees what this one has seen.
TILE_DEVICE uint32_t count_up(uint32_t* p, uint32_t last) {
    uint32_t before;
    asm volatile("atom.release.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(last) : "memory");
    return before;
}
template <class T> TILE_DEVICE T load_acquire(const T* p) {
    T x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
// The same without the order, for polling. A fence has to follow before anything is read that it announces.
TILE_DEVICE uint32_t load_relaxed(const uint32_t* p) {
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
TILE_DEVICE void spin() { __nanosleep(20); }

// ---- ldmatrix, stmatrix: four 8 × 8 matrices of 16-bit values; lane l addresses row l % 8 of matrix l / 8 -----------
TILE_DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
TILE_DEVICE void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
TILE_DEVICE void stmatrix(uint32_t address, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
#endif
}
TILE_DEVICE void stmatrix_transposed(uint32_t address, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#endif
}

// ---- mma.sync: d (16 × 8, float) += a (16 × k) b (k × 8) ------------------------------------------------------------
template <class T> TILE_DEVICE void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> TILE_DEVICE void mma_16x8x16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> TILE_DEVICE void mma_16x8x16<half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
TILE_DEVICE void mma_16x8x8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
TILE_DEVICE void mma_16x8x32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 890
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
TILE_DEVICE void mma_16x8x32_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- cp.async: 16 bytes from global to shared memory; those from `bytes` on become zero -----------------------------
TILE_DEVICE void copy_async_16(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
TILE_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroupsLeft> TILE_DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------
TILE_DEVICE void mbarrier_init(uint32_t address, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}
TILE_DEVICE void mbarrier_arrive(uint32_t address) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
#if __CUDA_ARCH__ >= 900
TILE_DEVICE void mbarrier_arrive_expect(uint32_t address, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has completed
TILE_DEVICE void mbarrier_wait(uint32_t address, int parity) {
    for (int done = 0; !done;)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(address), "r"(parity)
                     : "memory");
}
TILE_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
TILE_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- TMA: boxes of a tensor between global and shared memory --------------------------------------------------------
TILE_DEVICE void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
TILE_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}
TILE_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
TILE_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
TILE_DEVICE void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
TILE_DEVICE void tma_store(const TensorMap* map, uint32_t from, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
TILE_DEVICE void tma_store(const TensorMap* map, uint32_t from, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}
// Bytes that lie together, a multiple of 16: of global memory into shared memory; and floats of shared memory added to
// those of global memory
TILE_DEVICE void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
TILE_DEVICE void bulk_add(float* to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
TILE_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kGroupsLeft>
TILE_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
}
template <int kGroupsLeft> TILE_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroupsLeft) : "memory");
}

// ---- clusters: blocks that see each other's shared memory -----------------------------------------------------------
// The address of the same place in the shared memory of block `rank` of the cluster
TILE_DEVICE uint32_t address_in(uint32_t address, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// All threads of the cluster that have not ended arrive, then wait for each other. The arrival orders no memory: what
// fence_mbarrier_init has published is all that the others may count on.
TILE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
TILE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Stores to an address of address_in on their own time. They count on an mbarrier of the same block when they are
// there.
TILE_DEVICE void store_async(uint32_t to, float x, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x),
                 "r"(barrier)
                 : "memory");
}
TILE_DEVICE void store_async(uint32_t to, float x, float y, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(x),
                 "f"(y), "r"(barrier)
                 : "memory");
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------
TILE_DEVICE void let_dependents_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
TILE_DEVICE void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- wgmma ----------------------------------------------------------------------------------------------------------
TILE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TILE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kGroupsLeft> TILE_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroupsLeft) : "memory");
}
#endif

// ---- arithmetic that must round as it stands ------------------------------------------------------------------------
// a · b, rounded by itself: the compiler may not fuse it into a multiply-add
TILE_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }

// ---- for decode: an 8 × 8 transpose, arithmetic on pairs, loads of what other blocks wrote --------------------------
// Transposes an 8 × 8 matrix of 16-bit values, of which a lane has two of row lane / 4
TILE_DEVICE uint32_t transpose_matrix(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// a − b for two pairs of halves
TILE_DEVICE uint32_t subtract_halves(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
TILE_DEVICE uint32_t multiply_halves(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
#if __CUDA_ARCH__ >= 890
// The two e4m3 codes in the low or the high half of x, as halves
template <bool kHigh> TILE_DEVICE uint32_t e4m3_to_halves(uint32_t x) {
    uint32_t r;
    if constexpr (kHigh)
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(r) : "r"(x));
    else asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(r) : "r"(x));
    return r;
}
#endif
// The element-wise maximum of two pairs of signed 16-bit numbers
TILE_DEVICE uint32_t max_pairs(uint32_t a, uint32_t b) { return __vmaxs2(a, b); }
// Loads of 32 and of 16 bits by their shared address
TILE_DEVICE uint32_t load_shared(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
// After everything that stands before it and not sooner: what follows from it cannot be moved ahead either
TILE_DEVICE uint32_t load_shared_here(uint32_t address) {
    uint32_t x;
    asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
TILE_DEVICE uint32_t load_shared_16(uint32_t address) {
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}
// Brings a line into the L1 cache: a load whose result is never waited for, because a prefetch may stop at L2
TILE_DEVICE void touch(const void* p) {
    uint32_t unused;
    asm volatile("ld.global.ca.b8 %0, [%1];" : "=r"(unused) : "l"(p));
}
// A block that sees what this thread writes after the fence also sees what it wrote before.
TILE_DEVICE void fence_device() { __threadfence(); }
// Loads what another block has written during this launch: past the L1 cache, which may be stale
TILE_DEVICE void load_fresh(float& x, float& y, const float* p) {
    const float2 pair = __ldcg(reinterpret_cast<const float2*>(p));
    x = pair.x, y = pair.y;
}
TILE_DEVICE void load_fresh(float (&x)[4], const float* p) {
    const float4 y = __ldcg(reinterpret_cast<const float4*>(p));
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
#if __CUDA_ARCH__ >= 900
// True in one lane of a converged warp. Unlike a comparison of the lane's number it tells the compiler that it is one
// lane, which then issues a TMA copy once instead of in a loop over lanes.
TILE_DEVICE bool elect_leader() {
    uint32_t leads;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(leads));
    return leads;
}
// Like tma_load, for data that will not be read again soon: L2 evicts it first.
TILE_DEVICE void tma_load_once(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3,
                               int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
        "l"(0x12f0000000000000ull)  // evict_first, as createpolicy makes it
        : "memory");
}
#else
// Names only: what a constant leaves out of a kernel for older cards must still be declared.
TILE_DEVICE void mbarrier_arrive_expect(uint32_t, int) {}
TILE_DEVICE void mbarrier_wait(uint32_t, int) {}
TILE_DEVICE void fence_mbarrier_init() {}
TILE_DEVICE void fence_async_proxy() {}
TILE_DEVICE void prefetch_tensor_map(const TensorMap*) {}
TILE_DEVICE bool elect_leader() { return false; }
template <class... At> TILE_DEVICE void tma_load(uint32_t, const TensorMap*, uint32_t, At...) {}
template <class... At> TILE_DEVICE void tma_load_once(uint32_t, const TensorMap*, uint32_t, At...) {}
template <class T, int N> struct Wgmma;
#endif

}  // namespace ptx

#if __CUDA_ARCH__ >= 900
#include "tile/ptx_wgmma.cuh"
#endif
#endif
