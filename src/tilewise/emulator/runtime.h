// What a kernel sees of the emulator: the thread it runs as, rendezvous with its warp, barriers, checked memory.
//
// Each CUDA thread is a fiber. A collective (shuffle, ldmatrix, mma, barrier) is a rendezvous: every participant
// leaves a slot, and the last to arrive computes for all. Asynchronous work (cp.async, TMA, wgmma) lands as late as
// the program allows or as early as possible, by launch option, so a missing wait shows as a wrong number in one of
// the two.
//
// Accesses to shared memory that nothing orders are reported if the launch asks for it: runtime/races.cpp.
//
// Missing fences are reported. Every 4 bytes of shared memory carry the mark of the thread that stored there last by
// ordinary means, so TMA and wgmma, which go through the async proxy, are caught when they touch what no
// fence.proxy.async has handed over.
//
// Kernels include this file, and there are hundreds of them: what need not be inlined is declared here and defined in
// runtime/, which is compiled once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
// C's math.h as it is: libstdc++ would make it <cmath>, which takes longer to read than all the rest of a kernel.
#ifndef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
// Part of its caller whatever the optimisation, so that what it calls returns to the kernel's own line
#define EMU_INLINE inline __attribute__((always_inline))

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

struct TensorMap;  // types.h

namespace emu {

struct Block;
struct Fiber;

// A mark: which thread of the block, plus one, and which of its fences or releases came before. With no thread: copies
// that an mbarrier was told of by themselves, and the number of that announcement.
constexpr uint32_t kMarkStep = 1 << 11;

// The part of a fiber's state that kernels touch all the time.
struct Thread {
    dim3 thread_index, block_index, block_dim, grid_dim;
    int lane, warp;
    uint8_t* shared;          // this block's dynamic shared memory
    uint32_t shared_bytes;
    uint32_t* stored;         // by 4 bytes of it: the mark of the last ordinary store, 0 if there was none
    uint32_t* loaded;         // by 16 bytes of it: the mark of the last matrix load
    uint32_t store_mark;      // counts this thread's proxy fences
    uint32_t load_mark;       // counts its releases: barriers and the like, which let others see what it did
    uint32_t handed_over;     // its proxy fences that a release has followed
    uint32_t init_fences;     // fences after mbarrier_init
    uint32_t learned;         // announcements (Block) that there were when its last wait for an mbarrier ended
    uint32_t fenced;          // those that a proxy fence of this thread has followed
    bool watched;             // for races
    Fiber* fiber;
    Block* block;
};
extern constinit thread_local Thread* current;
inline Thread& self() { return *current; }

// The last lane of a warp to arrive runs act(slots, context); slots[lane] is what that lane left.
using Act = void (*)(void* const* slots, void* context);
void rendezvous(void* slot, const char* what, Act act, void* context);

template <class Slot, class F> void meet(Slot& slot, const char* what, F&& act) {
    rendezvous(
        &slot, what,
        [](void* const* slots, void* f) {
            (*static_cast<std::remove_reference_t<F>*>(f))(reinterpret_cast<Slot* const*>(slots));
        },
        &act);
}

void sync_warp();
void barrier_sync(int id, int count);
void barrier_arrive(int id, int count);
int barrier_count(int id, int count, bool x);  // syncs; how many came with x
// Let other threads run: what a spinning thread does between two looks.
void yield();

// ---- lanes --------------------------------------------------------------------------------------------------------
uint64_t shuffle(uint64_t x, int lane);
uint32_t ballot(bool x);
uint32_t transpose_matrix(uint32_t x);
void ldmatrix(uint32_t* r, uint32_t address, bool transposed);
void stmatrix(uint32_t address, const uint32_t* r, bool transposed);
// d (16 × 8) += a (16 × 32 bytes) b (32 bytes × 8), in the layout of mma.sync
enum class Type { half, bf16, e4m3, tf32, s8 };
void mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Type type);
void mma_s8(int* d, const uint32_t* a, uint32_t b0, uint32_t b1);
uint32_t pack_e4m3(float a, float b, float c, float d);
struct E4m3Values { float of_code[256]; };
extern const E4m3Values kE4m3;

// ---- mbarriers, by shared address ---------------------------------------------------------------------------------
void mbarrier_init(uint32_t address, int count);
void mbarrier_arrive(uint32_t address, int count);
void mbarrier_expect_tx(uint32_t address, int bytes);  // arrives as well
void mbarrier_wait(uint32_t address, int parity);

// ---- asynchronous work --------------------------------------------------------------------------------------------
void copy_async_16(uint32_t to, const void* from, int bytes);  // joins the thread's open group
void copy_async_commit();
void copy_async_wait(int groups_left);
void copy_async_arrive(uint32_t barrier);  // at an mbarrier, when all that the thread has asked for has landed
// A box of a tensor map with its coordinates: loads land on their own, stores join the thread's open bulk group.
void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, const int* at, int rank);
void tma_store(const TensorMap* map, uint32_t from, const int* at, int rank);
// Bytes that lie together: a load lands on its own, floats that are added join the thread's open bulk group.
void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier);
void bulk_add(float* to, uint32_t from, int bytes);
void bulk_commit();
void bulk_wait(int groups_left);

// ---- clusters -----------------------------------------------------------------------------------------------------
// An address in the shared memory of a block of the cluster: its offset, its block's rank, and a bit that says so.
constexpr uint32_t kClusterAddress = 1u << 31, kRankShift = 24;
uint32_t address_in(uint32_t address, int rank);
void cluster_arrive();
void cluster_wait();
void store_async(uint32_t to, const void* from, int bytes, uint32_t barrier);  // lands on its own, like a TMA load

// wgmma: each thread issues; a warp's sixteen rows are computed at the commit (early) or at the wait (late). The four
// warps of a warpgroup go at their own pace, as on a card, but must issue the same.
struct WgmmaOp {
    float* d;                 // this thread's accumulators
    uint32_t a[4];            // this thread's A fragment, if it comes from registers
    uint64_t a_desc, b_desc;
    int n;                    // columns
    bool a_in_registers, a_mn_major, b_mn_major, accumulate;
    Type type;
};
void wgmma_fence();
void wgmma_issue(const WgmmaOp& op);
void wgmma_commit();
void wgmma_wait(int groups_left);

// ---- checked memory -----------------------------------------------------------------------------------------------
// A failure ends the launch with a report that names the block, the thread and the source line.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail_shared(uint32_t address, size_t size);
enum class Access { load, store, atomic };
void check_global(const void* address, size_t size, Access access);
void check_store(void* address, const void* from, size_t size);  // the same of a store, with what is stored
inline void check_shared(uint32_t address, size_t size) {
    if (address + size > self().shared_bytes || address % size) fail_shared(address, size);
}
// For races, if the launch looks for them: runtime/races.cpp. line: of the kernel, a return address; the caller's if 0
// from: what is about to be stored.
void note_load(uint32_t address, size_t size, const void* line = nullptr);
void note_store(uint32_t address, const void* from, size_t size, const void* line = nullptr);
void note_atomic(uint32_t address);
// What atomics in global memory and fences order among threads, of all blocks that are in flight together
void note_release(const void* address);  // this thread's accesses so far
void note_relaxed(const void* address);  // those before its last fence; and from its next one on, those of others
void note_relaxed_load(const void* address);  // the latter
void note_acquire(const void* address);  // those of others
void note_fence();
EMU_INLINE const uint8_t* shared_load(uint32_t address, size_t size) {
    check_shared(address, size);
    if (self().watched) note_load(address, size);
    return self().shared + address;
}
// Bytes that are stored by ordinary means, as far as the async proxy goes
inline uint8_t* mark_stored(uint32_t address, size_t size) {
    Thread& t = self();
    for (size_t i = 0; i < size; i += 4) t.stored[(address + i) / 4] = t.store_mark;
    return t.shared + address;
}
EMU_INLINE void shared_store(uint32_t address, const void* from, size_t size) {
    check_shared(address, size);
    if (self().watched) note_store(address, from, size);
    std::memcpy(mark_stored(address, size), from, size);
}

// What this thread did is seen by whoever synchronises with it from here on.
inline void release() {
    Thread& t = self();
    t.load_mark += kMarkStep;
    t.handed_over = t.store_mark / kMarkStep;
}
inline void fence_mbarrier_init() { self().init_fences++; }
inline void fence_async_proxy() {
    Thread& t = self();
    t.store_mark += kMarkStep;
    t.fenced = t.learned;
    fence_mbarrier_init();
}
inline void note_matrix_load(uint32_t address) { self().loaded[address / 16] = self().load_mark; }

// ---- counters: what hardware would pay for ------------------------------------------------------------------------
// Requests are whole warps': lanes are brought together by call site and occurrence.
struct Counters {
    uint64_t global_requests, global_sectors, global_bytes;     // 32-byte sectors touched by warp-wide accesses
    uint64_t shared_requests, shared_wavefronts;                // more wavefronts than requests: bank conflicts
    uint64_t matrix_requests, matrix_wavefronts;                // the same for ldmatrix and stmatrix
    uint64_t async_bytes;                                       // by cp.async and TMA
    uint64_t tensor_flops, scalar_flops, exponentials;
    uint64_t barriers, mbarrier_waits;
};
// Null if nothing is counted.
extern constinit thread_local Counters* counters;
void count_matrix(const uint32_t (&rows)[8]);  // one 8 × 8 matrix of ldmatrix or stmatrix
void count_global(const void* address, size_t size);
void count_shared(uint32_t address, size_t size);
inline void count_scalar_flops(uint64_t n) {
    if (counters) counters->scalar_flops += n;
}

// ---- a launch, as launcher.py lays it out -------------------------------------------------------------------------
struct Range {
    const uint8_t* begin;
    const uint8_t* end;
    const char* name;
};
struct Options {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    uint32_t late;         // asynchronous work lands late (1) or early (0)
    uint32_t os_threads;
    uint32_t resident;     // blocks in flight together in one scheduler: 1 unless they talk to each other
    uint32_t cluster;      // blocks per cluster
    uint64_t seed;         // of the order fibers run in; 0 is round robin
    uint32_t count;        // whether to count
    uint32_t races;        // whether to look for races in shared memory
    uint32_t num_ranges;
    const Range* ranges;   // the tensors that may be touched
};
// Runs the kernel; returns 0, or 1 with a report.
int launch(const Options& options, void (*kernel)(void**), void** args, char* text, size_t size, Counters* total);

}  // namespace emu

#define threadIdx (emu::self().thread_index)
#define blockIdx (emu::self().block_index)
#define blockDim (emu::self().block_dim)
#define gridDim (emu::self().grid_dim)
