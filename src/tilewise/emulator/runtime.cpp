// The emulator's engine: fibers, the scheduler, rendezvous, asynchronous work, reports. Compiled once, linked to every kernel.
#include "emulator/runtime.h"

#include "emulator/types.h"

#include <execinfo.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace emu {

thread_local Thread* current = nullptr;
thread_local Counters* counters = nullptr;

// ---- fibers -----------------------------------------------------------------------------------------------------------
// A switch saves what a call must preserve on the old stack and takes it from the new one: some ten nanoseconds.
#if defined(__x86_64__)
asm(R"(
.text
.type emu_switch, @function
emu_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
static constexpr int kSavedWords = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.type emu_switch, %function
emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "The emulator switches fibers on x86-64 and AArch64 only"
#endif
extern "C" void emu_switch(void** save, void* load);

static constexpr size_t kStackBytes = 256 << 10;

// Stacks are reused from block to block; fresh ones are touched only as deep as the kernel goes.
struct StackPool {
    std::vector<uint8_t*> free;
    ~StackPool() {
        for (auto* s : free) munmap(s, kStackBytes);
    }
    uint8_t* take() {
        if (!free.empty()) {
            auto* s = free.back();
            free.pop_back();
            return s;
        }
        void* s = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (s == MAP_FAILED) {
            std::fputs("tilewise emulator: no memory for fiber stacks\n", stderr);
            std::abort();
        }
        return static_cast<uint8_t*>(s);
    }
};

struct Closure {
    Land land;
    std::vector<uint8_t> context;
    Thread* issuer;                                    // landing happens in its name: its block, its shared memory
    void operator()() {
        Thread* running = current;
        current = issuer;
        land(context.data());
        current = running;
    }
};

struct WgmmaGroup {
    std::vector<WgmmaOp> ops;
};

struct Fiber {
    Thread thread;
    uint8_t* stack = nullptr;
    void* sp = nullptr;
    bool done = false;
    bool queued = false;
    std::string waiting;                               // what it waits on, for the deadlock report
    std::deque<std::vector<Closure>> copies{1};        // cp.async groups; the last is open
    std::deque<std::vector<Closure>> stores{1};        // bulk store groups
    std::deque<WgmmaGroup> wgmma{1};
    std::unordered_map<const void*, uint32_t> occurrences;  // of each counted call site
};

struct Meeting {  // a rendezvous in progress
    void* slots[32];
    std::vector<Fiber*> waiting;
    int arrived = 0;
    const char* what = "";
};
struct Warpgroup {  // the wgmma its warps have issued, until all four have: they must be the same
    struct Issued { uint64_t a_desc, b_desc; int n, warps; };
    std::deque<Issued> issued;
    uint64_t first = 0;        // number of issued.front()
    uint64_t next[4] = {};     // of each warp
};
struct NamedBarrier {
    int arrived = 0, count = 0;
    std::vector<Fiber*> waiting;
};
struct Mbarrier {
    int pending = 0, expected = 0;
    int64_t bytes = 0;
    int phase = 0;
    std::vector<Fiber*> waiting;
};
struct Request {
    uint64_t address[32];  // by lane
    uint32_t size, lanes;  // lanes: a bit each
};

struct Scheduler;
struct Block {
    Scheduler* scheduler;
    dim3 index;
    std::vector<uint8_t> arena;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Meeting> warps;
    std::vector<Warpgroup> warpgroups;
    std::map<int, NamedBarrier> barriers;
    std::map<uint32_t, Mbarrier> mbarriers;
    std::map<std::pair<const void*, std::pair<int, uint32_t>>, Request> global_requests, shared_requests;
    unsigned live = 0;
    ~Block();
};

struct Launch {
    Options options;
    void (*kernel)(void** args);
    void** args;
    std::atomic<uint32_t> next_block{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    std::string report;
    Counters total{};
};

struct Scheduler {
    Launch* launch;
    StackPool stacks;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Fiber*> ready;
    size_t head = 0;                 // ready[head..] is the queue when the order is round robin
    std::deque<Closure> in_flight;   // bulk copies that have not landed
    Fiber* running = nullptr;
    bool yielded = false;            // the fiber that ran last gave up its turn: it waits for another in a loop
    uint64_t idle = 0;               // turns in a row that ended so
    void* sp = nullptr;
    uint64_t random;
    Counters counted{};

    uint64_t next_random() {         // xorshift64*
        random ^= random >> 12;
        random ^= random << 25;
        random ^= random >> 27;
        return random * 2685821657736338717ull;
    }
    void wake(Fiber* f) {
        if (!f->queued && !f->done) {
            f->queued = true;
            ready.push_back(f);
        }
    }
    Fiber* pick() {
        if (head == ready.size()) {
            ready.clear();
            head = 0;
            return nullptr;
        }
        if (launch->options.seed) std::swap(ready[head], ready[head + next_random() % (ready.size() - head)]);
        Fiber* f = ready[head++];
        if (head > 4096 && head * 2 > ready.size()) {
            ready.erase(ready.begin(), ready.begin() + long(head));
            head = 0;
        }
        f->queued = false;
        return f;
    }
    void land() {  // one of the copies in flight
        size_t at = launch->options.seed ? next_random() % in_flight.size() : 0;
        Closure c = std::move(in_flight[at]);
        in_flight.erase(in_flight.begin() + long(at));
        c();
    }
    void switch_to(Fiber* f) {
        running = f;
        current = &f->thread;
        emu_switch(&sp, f->sp);
        current = nullptr;
        running = nullptr;
    }
};
static thread_local Scheduler* scheduler = nullptr;

Block::~Block() {
    for (auto& f : fibers) scheduler->stacks.free.push_back(f->stack);
}

static void suspend(std::string why) {
    Fiber* f = scheduler->running;
    f->waiting = std::move(why);
    emu_switch(&f->sp, scheduler->sp);
}
void yield() {
    Fiber* f = scheduler->running;
    scheduler->wake(f);
    scheduler->yielded = true;
    suspend("its turn");
}

extern "C" void emu_fiber_main() {
    Launch* launch = scheduler->launch;
    launch->kernel(launch->args);
    Fiber* f = scheduler->running;
    f->done = true;
    f->thread.block->live--;
    for (;;) emu_switch(&f->sp, scheduler->sp);
}

static void prepare(Fiber& f) {
    auto top = reinterpret_cast<uintptr_t>(f.stack + kStackBytes) & ~uintptr_t(63);
#if defined(__x86_64__)
    auto* sp = reinterpret_cast<void**>(top) - 2;      // a function starts with its stack 8 bytes off 16
    *sp = reinterpret_cast<void*>(&emu_fiber_main);
    sp -= kSavedWords;
    std::memset(sp, 0, kSavedWords * sizeof(void*));
#else
    auto* sp = reinterpret_cast<void**>(top) - 20;
    std::memset(sp, 0, 160);
    sp[11] = reinterpret_cast<void*>(&emu_fiber_main);  // x30
#endif
    f.sp = sp;
}

// ---- failures ---------------------------------------------------------------------------------------------------------
static std::string place(const Thread& t) {
    char text[128];
    std::snprintf(text, sizeof text, "block (%u, %u, %u), thread (%u, %u, %u), warp %d lane %d", t.block_index.x, t.block_index.y,
                  t.block_index.z, t.thread_index.x, t.thread_index.y, t.thread_index.z, t.warp, t.lane);
    return text;
}
static void report(Launch* launch, const std::string& text) {
    std::lock_guard<std::mutex> lock(launch->mutex);
    if (!launch->failed.exchange(true)) launch->report = text;
}
void fail(const char* format, ...) {
    char text[512];
    va_list list;
    va_start(list, format);
    std::vsnprintf(text, sizeof text, format, list);
    va_end(list);
    std::string whole = std::string(text) + "\n  in " + place(self());
    void* frames[16];
    int n = backtrace(frames, 16);
    whole += "\n  at";
    for (int i = 1; i < n; i++) {  // addresses; the Python side turns them into file:line
        char address[32];
        std::snprintf(address, sizeof address, " %p", frames[i]);
        whole += address;
    }
    report(scheduler->launch, whole);
    for (;;) suspend("nothing: it failed");  // never scheduled again
}

// ---- rendezvous and barriers ------------------------------------------------------------------------------------------
void rendezvous(void* slot, const char* what, Act act, void* context) {
    Thread& t = self();
    Meeting& m = t.block->warps[t.warp];
    if (m.arrived && m.what != what && std::strcmp(m.what, what))
        fail("lanes of one warp meet in different instructions: %s here, %s elsewhere", what, m.what);
    m.slots[t.lane] = slot;
    m.what = what;
    if (++m.arrived < 32) {
        m.waiting.push_back(t.fiber);
        suspend(what);
        return;
    }
    act(m.slots, context);
    m.arrived = 0;
    for (Fiber* f : m.waiting) scheduler->wake(f);
    m.waiting.clear();
}

static void barrier_reach(NamedBarrier& b, int id, int count) {
    if (b.arrived && b.count != count) fail("barrier %d is used with %d threads here and %d elsewhere", id, count, b.count);
    b.count = count;
    b.arrived++;
}
static bool barrier_open(NamedBarrier& b) {
    if (b.arrived < b.count) return false;
    b.arrived = 0;
    for (Fiber* f : b.waiting) scheduler->wake(f);
    b.waiting.clear();
    return true;
}
void barrier_sync(int id, int count) {
    NamedBarrier& b = self().block->barriers[id];
    if (counters) counters->barriers++;
    barrier_reach(b, id, count);
    if (barrier_open(b)) return;
    b.waiting.push_back(self().fiber);
    suspend("barrier " + std::to_string(id) + " of " + std::to_string(count) + " threads");
}
void barrier_arrive(int id, int count) {
    NamedBarrier& b = self().block->barriers[id];
    barrier_reach(b, id, count);
    barrier_open(b);
}

static Mbarrier& mbarrier(Block* block, uint32_t address) {
    auto found = block->mbarriers.find(address);
    if (found == block->mbarriers.end()) fail("mbarrier at shared offset %u was never initialised", address);
    return found->second;
}
static void settle(Mbarrier& b) {
    if (b.pending || b.bytes) return;
    b.pending = b.expected;
    b.phase ^= 1;
    for (Fiber* f : b.waiting) scheduler->wake(f);
    b.waiting.clear();
}
void mbarrier_init(uint32_t address, int count) {
    check_shared(address, 8);
    Mbarrier& b = self().block->mbarriers[address];
    b = Mbarrier{};
    b.pending = b.expected = count;
}
void mbarrier_arrive(uint32_t address, int count) {
    Mbarrier& b = mbarrier(self().block, address);
    if ((b.pending -= count) < 0) fail("mbarrier at shared offset %u: more arrivals than its count of %d", address, b.expected);
    settle(b);
}
void mbarrier_expect_tx(uint32_t address, int bytes) {
    Mbarrier& b = mbarrier(self().block, address);
    b.bytes += bytes;
    if (--b.pending < 0) fail("mbarrier at shared offset %u: more arrivals than its count of %d", address, b.expected);
    settle(b);
}
void mbarrier_complete_tx(uint32_t address, int bytes) {
    Mbarrier& b = mbarrier(self().block, address);
    b.bytes -= bytes;
    settle(b);
}
bool mbarrier_test(uint32_t address, int parity) { return mbarrier(self().block, address).phase != (parity & 1); }
void mbarrier_wait(uint32_t address, int parity) {
    if (counters) counters->mbarrier_waits++;
    while (!mbarrier_test(address, parity)) {
        mbarrier(self().block, address).waiting.push_back(self().fiber);
        suspend("mbarrier at shared offset " + std::to_string(address) + ", parity " + std::to_string(parity));
    }
}

// ---- asynchronous work ------------------------------------------------------------------------------------------------
static Closure closure(Land land, const void* context, size_t size) {
    auto* bytes = static_cast<const uint8_t*>(context);
    return {land, {bytes, bytes + size}, current};
}
static bool late() { return scheduler->launch->options.late; }
static void land_all(std::vector<Closure>& work) {
    for (auto& c : work) c();
    work.clear();
}
void async_copy(Land land, const void* context, size_t size) {
    Closure c = closure(land, context, size);
    if (late()) self().fiber->copies.back().push_back(std::move(c));
    else c();
}
void async_copy_commit() { self().fiber->copies.emplace_back(); }
void async_copy_wait(int groups_left) {
    auto& groups = self().fiber->copies;
    while (int(groups.size()) - 1 > groups_left) {
        land_all(groups.front());
        groups.pop_front();
    }
}
void bulk_copy(Land land, const void* context, size_t size) {
    Closure c = closure(land, context, size);
    if (late()) scheduler->in_flight.push_back(std::move(c));
    else c();
}
void bulk_store(Land land, const void* context, size_t size) {
    Closure c = closure(land, context, size);
    if (late()) self().fiber->stores.back().push_back(std::move(c));
    else c();
}
void bulk_commit() { self().fiber->stores.emplace_back(); }
void bulk_wait(int groups_left) {
    auto& groups = self().fiber->stores;
    while (int(groups.size()) - 1 > groups_left) {
        land_all(groups.front());
        groups.pop_front();
    }
}

// Bits 4 … of an address are exchanged with its bits 7 …: how TMA and wgmma spread rows over the banks.
uint32_t swizzled(uint32_t address, uint32_t span) {
    return span == 128 ? address ^ ((address >> 3) & 0x70) : span == 64 ? address ^ ((address >> 3) & 0x30)
           : span == 32 ? address ^ ((address >> 3) & 0x10) : address;
}

// Element (mn, k) of an operand of `size`-byte elements in shared memory, through a descriptor: start address, leading and stride
// byte offsets in units of 16 bytes, the swizzle in the top two bits. Units of 16 bytes are T; the layouts are the hardware's
// canonical ones.
static uint32_t operand_address(uint64_t descriptor, bool mn_major, uint32_t mn, uint32_t k, uint32_t size) {
    uint32_t start = uint32_t(descriptor & 0x3fff) << 4, leading = uint32_t(descriptor >> 16 & 0x3fff) << 4;
    uint32_t stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
    static constexpr uint32_t kSpan[4] = {16, 128, 64, 32};  // bytes a swizzle repeats after; 16: none
    const uint32_t span = kSpan[descriptor >> 62], unit = 16 / size;
    if (mn_major && size != 2) fail("wgmma of an operand that is MN-major, which only 16-bit ones may be");
    uint32_t offset;
    if (span == 16)
        offset = mn_major ? mn / 8 * stride + mn % 8 * 2 + k % 8 * 16 + k / 8 * leading
                          : mn / 8 * stride + mn % 8 * 16 + k / unit * leading + k % unit * size;
    else if (mn_major)
        offset = mn / (span / 2) * leading + mn % (span / 2) * 2 + k % 8 * span + k / 8 * stride;
    else
        offset = mn / 8 * stride + mn % 8 * span + k * size;
    return swizzled(start + offset, span);
}

// A warp's rows: d (16 × n) = a (16 × K) b (K × n) [+ d], K being 32 bytes. Lane l holds of d: rows l / 4 and l / 4 + 8, columns in
// pairs; of a: the same rows, four bytes of each half of K.
template <class T> static void wgmma_run_as(const WgmmaOp* const* ops) {
    const WgmmaOp& op = *ops[0];
    constexpr int kSize = sizeof(T), kDepth = 32 / kSize, kInWord = 4 / kSize;
    static thread_local float a[16][kDepth], b[kDepth][256];
    auto value = [](const void* from) {
        T x;
        std::memcpy(&x, from, kSize);
        return to_float(x);
    };
    auto element = [&](uint32_t address) { return value(shared_at(address, kSize)); };
    const uint32_t first = uint32_t(self().warp % 4) * 16;
    for (uint32_t m = 0; m < 16; m++)
        for (uint32_t k = 0; k < kDepth && !op.a_in_registers; k++)
            a[m][k] = element(operand_address(op.a_desc, op.a_mn_major, first + m, k, kSize));
    for (int l = 0; l < 32 && op.a_in_registers; l++)
        for (int i = 0; i < 4; i++)
            for (int h = 0; h < kInWord; h++)
                a[l / 4 + 8 * (i % 2)][l % 4 * kInWord + h + kDepth / 2 * (i / 2)] =
                    value(reinterpret_cast<const uint8_t*>(&ops[l]->a[i]) + h * kSize);
    for (int n = 0; n < op.n; n++)
        for (uint32_t k = 0; k < kDepth; k++) b[k][n] = element(operand_address(op.b_desc, op.b_mn_major, uint32_t(n), k, kSize));
    for (int m = 0; m < 16; m++) {
        float row[256] = {};
        for (int k = 0; k < kDepth; k++)
            for (int n = 0; n < op.n; n++) row[n] += a[m][k] * b[k][n];
        for (int c = 0; c < 4; c++) {
            float* d = ops[m % 8 * 4 + c]->d;
            for (int n = 0; n < op.n / 8; n++)
                for (int h = 0; h < 2; h++) {
                    float& x = d[4 * n + m / 8 * 2 + h];
                    x = (op.accumulate ? x : 0.0f) + row[8 * n + 2 * c + h];
                }
        }
    }
    if (counters) counters->tensor_flops += 2ull * 16 * kDepth * uint64_t(op.n);
}
static void wgmma_run(const WgmmaOp* const* ops) {
    Warpgroup& group = self().block->warpgroups[self().warp / 4];
    const WgmmaOp& op = *ops[0];
    uint64_t number = group.next[self().warp % 4]++;
    if (number - group.first == group.issued.size()) group.issued.push_back({op.a_desc, op.b_desc, op.n, 0});
    auto& same = group.issued[number - group.first];
    if (same.a_desc != op.a_desc || same.b_desc != op.b_desc || same.n != op.n)
        fail("warps of one warpgroup issued different wgmma: descriptors and width must be the same in all four");
    same.warps++;
    while (!group.issued.empty() && group.issued.front().warps == 4) {
        group.issued.pop_front();
        group.first++;
    }
    if (op.type == WgmmaType::e4m3) wgmma_run_as<e4m3>(ops);
    else if (op.type == WgmmaType::bf16) wgmma_run_as<bf16>(ops);
    else wgmma_run_as<half>(ops);
}

void wgmma_issue(const WgmmaOp& op) { self().fiber->wgmma.back().ops.push_back(op); }
static void run_oldest_wgmma_group() {
    WgmmaGroup* group = &self().fiber->wgmma.front();
    meet(*group, "wgmma", [](WgmmaGroup* const* groups) {
        for (size_t i = 0; i < groups[0]->ops.size(); i++) {
            const WgmmaOp* ops[32];
            for (int l = 0; l < 32; l++) {
                if (groups[l]->ops.size() != groups[0]->ops.size()) fail("lanes of one warp issued different numbers of wgmma");
                ops[l] = &groups[l]->ops[i];
            }
            wgmma_run(ops);
        }
    });
    self().fiber->wgmma.pop_front();
}
void wgmma_commit() {
    auto& groups = self().fiber->wgmma;
    groups.emplace_back();
    if (!late())
        while (groups.size() > 1) run_oldest_wgmma_group();
}
void wgmma_wait(int groups_left) {
    auto& groups = self().fiber->wgmma;
    while (int(groups.size()) - 1 > groups_left) run_oldest_wgmma_group();
}

// ---- memory and counters ----------------------------------------------------------------------------------------------
void check_global(const void* address, size_t size, Access access) {
    auto* p = static_cast<const uint8_t*>(address);
    const Options& o = scheduler->launch->options;
    const char* verb = access == Access::load ? "read" : access == Access::store ? "write" : "atomic";
    for (uint32_t i = 0; i < o.num_ranges; i++)
        if (p >= o.ranges[i].begin && p + size <= o.ranges[i].end) {
            if (uintptr_t(p) % size) fail("global %s of %zu bytes is not aligned to them", verb, size);
            return;
        }
    const Range* nearest = nullptr;
    for (uint32_t i = 0; i < o.num_ranges; i++)
        if (p >= o.ranges[i].begin && (!nearest || o.ranges[i].begin > nearest->begin)) nearest = &o.ranges[i];
    if (nearest)
        fail("global %s of %zu bytes outside every tensor: %td bytes past the end of %s", verb, size, p + size - nearest->end,
             nearest->name);
    fail("global %s of %zu bytes outside every tensor, at %p", verb, size, address);
}

template <class Requests> static void note(Requests& requests, uint64_t address, size_t size, const void* site) {
    Thread& t = self();
    uint32_t occurrence = t.fiber->occurrences[site]++;
    Request& r = requests[{site, {t.warp, occurrence}}];
    r.size = uint32_t(size);
    r.address[t.lane] = address;
    r.lanes |= 1u << t.lane;
}
__attribute__((noinline)) void count_global(const void* address, size_t size) {
    note(self().block->global_requests, reinterpret_cast<uint64_t>(address), size, __builtin_return_address(0));
}
__attribute__((noinline)) void count_shared(uint32_t address, size_t size) {
    note(self().block->shared_requests, address, size, __builtin_return_address(0));
}
void count_matrix(const uint32_t (&rows)[8]) {
    if (!counters) return;
    int used[32] = {}, worst = 1;
    for (int i = 0; i < 8; i++) {
        bool seen = false;
        for (int j = 0; j < i; j++) seen |= rows[j] == rows[i];
        for (uint32_t w = 0; w < 4 && !seen; w++) worst = std::max(worst, ++used[(rows[i] / 4 + w) % 32]);
    }
    counters->matrix_requests++;
    counters->matrix_wavefronts += uint64_t(worst);
}
static void tally(Block& block, Counters& c) {
    for (auto& [_, r] : block.global_requests) {
        std::vector<uint64_t> sectors;
        for (uint32_t l = 0; l < 32; l++)
            for (uint64_t a = r.address[l] / 32; (r.lanes >> l & 1) && a <= (r.address[l] + r.size - 1) / 32; a++) sectors.push_back(a);
        std::sort(sectors.begin(), sectors.end());
        c.global_sectors += uint64_t(std::unique(sectors.begin(), sectors.end()) - sectors.begin());
        c.global_requests++;
        c.global_bytes += uint64_t(__builtin_popcount(r.lanes)) * r.size;
    }
    for (auto& [_, r] : block.shared_requests) {
        // 32 banks of 4 bytes; wide accesses go in groups of lanes that fill the banks once; equal words are one.
        uint32_t at_once = r.size <= 4 ? 32 : 128 / r.size;
        for (uint32_t first = 0; first < 32; first += at_once) {
            std::map<uint32_t, std::vector<uint64_t>> banks;
            for (uint32_t l = first; l < first + at_once; l++)
                for (uint64_t w = r.address[l] / 4; (r.lanes >> l & 1) && w <= (r.address[l] + r.size - 1) / 4; w++) {
                    auto& words = banks[w % 32];
                    if (std::find(words.begin(), words.end(), w) == words.end()) words.push_back(w);
                }
            if (banks.empty()) continue;
            size_t worst = 1;
            for (auto& [bank, words] : banks) worst = std::max(worst, words.size());
            c.shared_requests++;
            c.shared_wavefronts += worst;
        }
    }
}
static void add(Counters& total, const Counters& c) {
    auto* t = reinterpret_cast<uint64_t*>(&total);
    auto* s = reinterpret_cast<const uint64_t*>(&c);
    for (size_t i = 0; i < sizeof(Counters) / sizeof(uint64_t); i++) t[i] += s[i];
}

// ---- the launch -------------------------------------------------------------------------------------------------------
static std::unique_ptr<Block> make_block(Scheduler& s, uint32_t number) {
    const Options& o = s.launch->options;
    auto block = std::make_unique<Block>();
    block->scheduler = &s;
    block->index = {number % o.grid[0], number / o.grid[0] % o.grid[1], number / (o.grid[0] * o.grid[1])};
    block->arena.assign(o.shared_bytes + 1024, 0xff);  // NaN in every float format: reads of unset memory show
    auto* shared = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(block->arena.data()) + 1023) & ~uintptr_t(1023));
    unsigned threads = o.block[0] * o.block[1] * o.block[2];
    block->warps.resize((threads + 31) / 32);
    block->warpgroups.resize((threads + 127) / 128);
    block->live = threads;
    for (unsigned t = 0; t < threads; t++) {
        auto f = std::make_unique<Fiber>();
        f->thread = Thread{{t % o.block[0], t / o.block[0] % o.block[1], t / (o.block[0] * o.block[1])},
                           block->index,
                           {o.block[0], o.block[1], o.block[2]},
                           {o.grid[0], o.grid[1], o.grid[2]},
                           int(t % 32),
                           int(t / 32),
                           shared,
                           o.shared_bytes,
                           f.get(),
                           block.get()};
        f->stack = s.stacks.take();
        prepare(*f);
        s.wake(f.get());
        block->fibers.push_back(std::move(f));
    }
    return block;
}

static void retire(Scheduler& s, Block& block) {
    for (auto& group : block.warpgroups)
        if (!group.issued.empty()) report(s.launch, "the warps of a warpgroup issued different numbers of wgmma");
    if (counters) tally(block, *counters);
    std::erase_if(s.in_flight, [&](const Closure& c) { return c.issuer->block == &block; });
    for (auto& f : block.fibers)
        for (auto& group : f->stores) land_all(group);  // what was stored arrives, waited for or not
}

static void deadlock(Scheduler& s) {
    std::string text = "deadlock: no thread can go on\n";
    std::map<std::string, std::vector<std::string>> by_reason;
    for (auto& block : s.blocks)
        for (auto& f : block->fibers)
            if (!f->done && f->thread.lane == 0) {
                char who[96];
                std::snprintf(who, sizeof who, "block (%u, %u, %u) warp %d", block->index.x, block->index.y, block->index.z,
                              f->thread.warp);
                by_reason[f->waiting].push_back(who);
            }
    for (auto& [reason, who] : by_reason) {
        text += "  waiting on " + reason + ":";
        for (size_t i = 0; i < who.size() && i < 8; i++) text += (i ? ", " : " ") + who[i];
        text += who.size() > 8 ? ", …\n" : "\n";
    }
    for (auto& block : s.blocks)
        for (auto& [address, b] : block->mbarriers)
            if (!b.waiting.empty()) {
                char line[160];
                std::snprintf(line, sizeof line, "  mbarrier at shared offset %u: phase %d, %d of %d arrivals and %lld bytes to come\n",
                              address, b.phase, b.pending, b.expected, static_cast<long long>(b.bytes));
                text += line;
            }
    report(s.launch, text);
}

static void work(Launch* launch, uint64_t seed) {
    Scheduler s;
    s.launch = launch;
    s.random = seed * 0x9e3779b97f4a7c15ull | 1;
    scheduler = &s;
    counters = launch->options.count ? &s.counted : nullptr;
    uint32_t total = launch->options.grid[0] * launch->options.grid[1] * launch->options.grid[2];
    while (!launch->failed) {
        while (s.blocks.size() < launch->options.resident) {
            uint32_t n = launch->next_block++;
            if (n >= total) break;
            s.blocks.push_back(make_block(s, n));
        }
        if (s.blocks.empty()) break;
        bool stuck = false;
        while (Fiber* f = s.pick()) {
            if (f->done) continue;
            s.yielded = false;
            s.switch_to(f);
            if (launch->failed) break;
            s.idle = s.yielded ? s.idle + 1 : 0;
            // Whoever can move only looks round in a loop: it is time for a copy to land; if none is left to, nothing will change.
            const uint64_t movable = s.ready.size() - s.head;
            if (s.idle > movable && !s.in_flight.empty()) {
                s.land();
                s.idle = 0;
            }
            stuck = s.idle > 1000 * movable + 1000;
            if (stuck) break;
        }
        if (launch->failed) break;
        if (stuck) {
            deadlock(s);
            break;
        }
        size_t before = s.blocks.size();
        for (size_t i = 0; i < s.blocks.size();)
            if (s.blocks[i]->live) i++;
            else {
                retire(s, *s.blocks[i]);
                s.blocks.erase(s.blocks.begin() + long(i));
            }
        if (s.blocks.size() < before) continue;
        if (!s.in_flight.empty()) {  // nobody can move: time for copies to land
            s.land();
            continue;
        }
        deadlock(s);
    }
    std::lock_guard<std::mutex> lock(launch->mutex);
    add(launch->total, s.counted);
}

int launch(const Options& options, void (*kernel)(void**), void** args, char* text, size_t size, Counters* total) {
    Launch l;
    l.options = options;
    l.kernel = kernel;
    l.args = args;
    unsigned threads = options.resident > 1 ? 1 : std::max(1u, options.os_threads);
    std::vector<std::thread> workers;
    for (unsigned i = 1; i < threads; i++) workers.emplace_back(work, &l, options.seed + i);
    work(&l, options.seed);
    for (auto& w : workers) w.join();
    if (total) *total = l.total;
    if (!l.failed) return 0;
    std::snprintf(text, size, "%s", l.report.c_str());
    return 1;
}

}  // namespace emu
