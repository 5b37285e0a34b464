// What a kernel sees of the emulator: the thread it runs as, rendezvous with its warp, barriers, checked memory.
//
// Each CUDA thread is a fiber. A collective (shuffle, ldmatrix, mma, barrier) is a rendezvous: every participant leaves a
// slot, the last to arrive computes for all. Asynchronous work (cp.async, TMA, wgmma) lands as late as the program allows
// or as early as possible, by launch option, so a missing wait shows as a wrong number in one of the two.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace emu {

struct Block;
struct Fiber;

// The part of a fiber's state that kernels touch all the time.
struct Thread {
    dim3 thread_index, block_index, block_dim, grid_dim;
    int lane, warp;
    uint8_t* shared;          // this block's dynamic shared memory
    uint32_t shared_bytes;
    Fiber* fiber;
    Block* block;
};
extern thread_local Thread* current;
inline Thread& self() { return *current; }

// The last lane of a warp to arrive runs act(slots, context); slots[lane] is what that lane left.
using Act = void (*)(void* const* slots, void* context);
void rendezvous(void* slot, const char* what, Act act, void* context);

template <class Slot, class F> void meet(Slot& slot, const char* what, F&& act) {
    rendezvous(
        &slot, what, [](void* const* slots, void* f) { (*static_cast<F*>(f))(reinterpret_cast<Slot* const*>(slots)); },
        &act);
}

void barrier_sync(int id, int count);
void barrier_arrive(int id, int count);

// mbarriers, by shared address.
void mbarrier_init(uint32_t address, int count);
void mbarrier_arrive(uint32_t address, int count);
void mbarrier_expect_tx(uint32_t address, int bytes);  // arrives as well
void mbarrier_complete_tx(uint32_t address, int bytes);
bool mbarrier_test(uint32_t address, int parity);
void mbarrier_wait(uint32_t address, int parity);

// Asynchronous work. `land(context)` is called once, when the model says so; context is copied (size bytes).
using Land = void (*)(void* context);
void async_copy(Land land, const void* context, size_t size);        // cp.async: joins the thread's open group
void async_copy_commit();
void async_copy_wait(int groups_left);
void bulk_copy(Land land, const void* context, size_t size);         // TMA load: lands on its own
void bulk_store(Land land, const void* context, size_t size);        // TMA store: joins the thread's open bulk group
void bulk_commit();
void bulk_wait(int groups_left);

// wgmma: each thread issues; a warp's sixteen rows are computed at the commit (early) or at the wait (late). The four warps of a
// warpgroup go at their own pace, as on a card, but must issue the same.
enum class WgmmaType { half, bf16, e4m3 };
struct WgmmaOp {
    float* d;                 // this thread's accumulators
    uint32_t a[4];            // this thread's A fragment, if it comes from registers
    uint64_t a_desc, b_desc;
    int n;                    // columns
    bool a_in_registers, a_mn_major, b_mn_major, accumulate;
    WgmmaType type;
};
void wgmma_issue(const WgmmaOp& op);
void wgmma_commit();
void wgmma_wait(int groups_left);

// Checked memory. A failure ends the launch with a report that names the block, the thread and the source line.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
enum class Access { load, store, atomic };
void check_global(const void* address, size_t size, Access access);
inline void check_shared(uint32_t address, size_t size) {
    if (address + size > self().shared_bytes || address % size)
        fail("shared memory access of %zu bytes at offset %u: the block has %u bytes", size, address, self().shared_bytes);
}
inline uint8_t* shared_at(uint32_t address, size_t size) {
    check_shared(address, size);
    return self().shared + address;
}

// What hardware would pay for. Requests are whole warps': lanes are brought together by call site and occurrence.
struct Counters {
    uint64_t global_requests, global_sectors, global_bytes;     // 32-byte sectors touched by warp-wide accesses
    uint64_t shared_requests, shared_wavefronts;                // more wavefronts than requests: bank conflicts
    uint64_t matrix_requests, matrix_wavefronts;                // the same for ldmatrix and stmatrix
    uint64_t async_bytes;                                       // by cp.async and TMA
    uint64_t tensor_flops, scalar_flops, exponentials;
    uint64_t barriers, mbarrier_waits;
};
extern thread_local Counters* counters;  // null: not counting
void count_matrix(const uint32_t (&rows)[8]);  // one 8 × 8 matrix of ldmatrix or stmatrix
void count_global(const void* address, size_t size);
void count_shared(uint32_t address, size_t size);
inline void count_scalar_flops(uint64_t n) {
    if (counters) counters->scalar_flops += n;
}

// A launch, as emulate.py lays it out.
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
    uint64_t seed;         // of the order fibers run in; 0 is round robin
    uint32_t count;        // whether to count
    uint32_t num_ranges;
    const Range* ranges;   // the tensors that may be touched
};
// Runs the kernel; returns 0, or 1 with a report.
int launch(const Options& options, void (*kernel)(void**), void** args, char* text, size_t size, Counters* total);

// Let other threads run: what a spinning thread does between two looks.
void yield();

}  // namespace emu

#define threadIdx (emu::self().thread_index)
#define blockIdx (emu::self().block_index)
#define blockDim (emu::self().block_dim)
#define gridDim (emu::self().grid_dim)
