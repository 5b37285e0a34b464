// Fibers and the switch between them, the scheduler, and the launch that runs blocks on it.
#include "emulator/runtime/engine.h"

#include <thread>

namespace emu {

constinit thread_local Thread* current = nullptr;
constinit thread_local Counters* counters = nullptr;
constinit thread_local Scheduler* scheduler = nullptr;

// ---- fibers -------------------------------------------------------------------------------------------------------
// A switch saves what a call must preserve on the old stack and takes it from the new one: some ten nanoseconds.
#if defined(__x86_64__)
asm(R"(
.text
.type emu_switch, @function
.hidden emu_switch
.globl emu_switch
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
.hidden emu_switch
.globl emu_switch
emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "The emulator switches fibers on x86-64 and AArch64 only"
#endif

Fiber* Scheduler::pick() {
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
void Scheduler::land() {
    size_t at = launch->options.seed ? next_random() % in_flight.size() : 0;
    // A thread's arrivals follow each other: each is of all copies that it has asked for until then.
    for (size_t i = 0; in_flight[at].kind == Copy::cp_async_arrive && i < at; i++)
        if (in_flight[i].kind == Copy::cp_async_arrive && in_flight[i].issuer == in_flight[at].issuer) at = i;
    const Copy c = in_flight[at];
    in_flight.erase(in_flight.begin() + long(at));
    c.land();
}
void Scheduler::switch_to(Fiber* f) {
    running = f;
    current = &f->thread;
    emu_switch(&sp, f->sp);
    current = nullptr;
    running = nullptr;
}

Block::~Block() {
    for (auto& f : fibers) scheduler->stacks.free.push_back(f->stack);
}

void suspend(std::string why) {
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

static void fiber_main() {
    Launch* launch = scheduler->launch;
    launch->kernel(launch->args);
    Fiber* f = scheduler->running;
    f->done = true;
    f->thread.block->live--;
    leave_cluster(*f);
    for (;;) emu_switch(&f->sp, scheduler->sp);
}

void prepare(Fiber& f) {
    auto top = reinterpret_cast<uintptr_t>(f.stack + kStackBytes) & ~uintptr_t(63);
#if defined(__x86_64__)
    auto* sp = reinterpret_cast<void**>(top) - 2;      // a function starts with its stack 8 bytes off 16
    *sp = reinterpret_cast<void*>(&fiber_main);
    sp -= kSavedWords;
    std::memset(sp, 0, kSavedWords * sizeof(void*));
#else
    auto* sp = reinterpret_cast<void**>(top) - 20;
    std::memset(sp, 0, 160);
    sp[11] = reinterpret_cast<void*>(&fiber_main);  // x30
#endif
    f.sp = sp;
}

// ---- the launch ---------------------------------------------------------------------------------------------------
static std::unique_ptr<Block> make_block(Scheduler& s, uint32_t number) {
    const Options& o = s.launch->options;
    auto block = std::make_unique<Block>();
    block->scheduler = &s;
    block->index = {number % o.grid[0], number / o.grid[0] % o.grid[1], number / (o.grid[0] * o.grid[1])};
    block->arena.assign(o.shared_bytes + 1024, 0xff);  // NaN in every float format: reads of unset memory show
    block->stored.assign(o.shared_bytes / 4 + 4, 0);
    block->loaded.assign(o.shared_bytes / 16 + 1, 0);
    const auto begin = reinterpret_cast<uintptr_t>(block->arena.data());
    auto* shared = reinterpret_cast<uint8_t*>((begin + 1023) & ~uintptr_t(1023));
    unsigned threads = o.block[0] * o.block[1] * o.block[2];
    block->warps.resize((threads + 31) / 32);
    block->warpgroups.resize((threads + 127) / 128);
    block->multipliers.resize((threads + 31) / 32);
    block->live = threads;
    for (unsigned t = 0; t < threads; t++) {
        auto f = std::make_unique<Fiber>();
        Thread& thread = f->thread;
        thread = {};
        thread.thread_index = {t % o.block[0], t / o.block[0] % o.block[1], t / (o.block[0] * o.block[1])};
        thread.block_index = block->index;
        thread.block_dim = {o.block[0], o.block[1], o.block[2]};
        thread.grid_dim = {o.grid[0], o.grid[1], o.grid[2]};
        thread.lane = int(t % 32);
        thread.warp = int(t / 32);
        thread.shared = shared;
        thread.shared_bytes = o.shared_bytes;
        thread.stored = block->stored.data();
        thread.loaded = block->loaded.data();
        thread.store_mark = thread.load_mark = t + 1;
        thread.fiber = f.get();
        thread.block = block.get();
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
    for (const Copy& c : s.in_flight)
        if (c.kind == Copy::cluster_store && c.issuer->block == &block)
            report(s.launch, "a block ended while store_async to it was under way: it did not wait on its mbarrier");
    block.cluster->blocks[block.rank] = nullptr;
    std::erase_if(s.in_flight, [&](const Copy& c) { return c.issuer->block == &block; });
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
                std::snprintf(who, sizeof who, "block (%u, %u, %u) warp %d", block->index.x, block->index.y,
                              block->index.z, f->thread.warp);
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
                std::snprintf(line, sizeof line,
                              "  mbarrier at shared offset %u: phase %d, %d of %d arrivals and %lld bytes to come\n",
                              address, b.phase, b.pending, b.expected, static_cast<long long>(b.bytes));
                text += line;
            }
    report(s.launch, text);
}

// Runs fibers until none is ready; false if they only look round in loops and nothing is left to land.
static bool run_ready(Scheduler& s) {
    while (Fiber* f = s.pick()) {
        if (f->done) continue;
        s.yielded = false;
        s.switch_to(f);
        if (s.launch->failed) return true;
        s.idle = s.yielded ? s.idle + 1 : 0;
        // Every fiber that can move only looks round in a loop: it is time for a copy to land.
        const uint64_t movable = s.ready.size() - s.head;
        if (s.idle > movable && !s.in_flight.empty()) {
            s.land();
            s.idle = 0;
        }
        if (s.idle > 1000 * movable + 1000) return false;
    }
    return true;
}

static void work(Launch* launch, uint64_t seed) {
    Scheduler s;
    s.launch = launch;
    s.random = seed * 0x9e3779b97f4a7c15ull | 1;
    scheduler = &s;
    counters = launch->options.count ? &s.counted : nullptr;
    uint32_t total = launch->options.grid[0] * launch->options.grid[1] * launch->options.grid[2];
    while (!launch->failed) {
        const uint32_t each = launch->options.cluster;
        if (s.blocks.empty()) {  // what blocks did that are gone is before all that others do
            s.agents.clear();
            s.words.clear();
            s.atomics.clear();
        }
        while (s.blocks.size() + each <= std::max(each, launch->options.resident)) {
            const uint32_t n = launch->next_block.fetch_add(each);
            if (n >= total) break;
            auto cluster = std::make_shared<Cluster>();
            for (uint32_t rank = 0; rank < each; rank++) {
                s.blocks.push_back(make_block(s, n + rank));
                Block& block = *s.blocks.back();
                block.cluster = cluster;
                block.rank = rank;
                cluster->blocks.push_back(&block);
                if (launch->options.races) watch(block);
                cluster->live = cluster->pending = cluster->live + block.live;
            }
        }
        if (s.blocks.empty()) break;
        const bool moves = run_ready(s);
        if (launch->failed) break;
        if (!moves) {
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
    const uint32_t blocks = options.grid[0] * options.grid[1] * options.grid[2] / options.cluster;
    const unsigned threads = options.resident > 1 ? 1 : std::max(1u, std::min(options.os_threads, blocks));
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
