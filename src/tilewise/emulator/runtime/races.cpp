// Races: two accesses to the same bytes, one of them a store, that nothing orders: of shared memory, and of global memory
// by blocks that are in flight together.
//
// They are found whatever the order in which the fibers happened to run, by clocks. An agent is a thread, or what works
// beside threads: a thread's cp.async, a thread's bulk stores, a warp's wgmma, the copies that an mbarrier counts. Each
// agent has a clock, and every access carries the agent and what its clock said. `Clocks` tells up to which time of
// each agent somebody has synchronised with it. A release (an arrival, a barrier) adds what a thread knows to what the
// barrier knows, and then the thread's clock goes on; an acquire (a wait) adds what the barrier knew when it opened to
// what the thread knows. An access is ordered after another one if its thread knows that one's time.
//
// Asynchronous work is an access by its own agent: the thread that asks for it must know of all accesses before it, and
// whoever comes after it must know, by a wait, that it is done.
#include "emulator/runtime/engine.h"

namespace emu {

void Clocks::join(const Clocks& other) {
    if (of.size() < other.of.size()) of.resize(other.of.size());
    for (size_t i = 0; i < other.of.size(); i++) of[i] = std::max(of[i], other.of[i]);
}
void Clocks::raise(uint32_t agent, uint32_t time) {
    if (of.size() <= agent) of.resize(agent + 1);
    of[agent] = std::max(of[agent], time);
}

uint32_t add_agent(Block& block, std::string name) {
    block.scheduler->agents.push_back(std::move(name));
    return uint32_t(block.scheduler->agents.size()) - 1;
}
void watch(Block& block) {
    block.words.resize(block.fibers[0]->thread.shared_bytes / 4 + 4);
    for (auto& f : block.fibers) {
        f->agent = add_agent(block, "");
        f->known.raise(f->agent, 1);
        f->thread.watched = true;
    }
}
uint32_t agent_of(uint32_t& agent, const char* what) {
    if (!agent) agent = add_agent(*self().block, std::string(what) + " of " + place(self()));
    return agent;
}

// ---- what orders accesses -------------------------------------------------------------------------------------------
void tell(Clocks& to) {
    Fiber& f = *self().fiber;
    to.join(f.known);
    f.known.of[f.agent]++;
}
void learn(const Clocks& from) { self().fiber->known.join(from); }

// A fence stands between what a thread did and an atomic by which others learn of it, or the other way round.
void note_release(const void* address) { tell(scheduler->atomics[reinterpret_cast<uintptr_t>(address)]); }
void note_acquire(const void* address) { learn(scheduler->atomics[reinterpret_cast<uintptr_t>(address)]); }
void note_relaxed_load(const void* address) {
    self().fiber->coming.join(scheduler->atomics[reinterpret_cast<uintptr_t>(address)]);
}
void note_relaxed(const void* address) {
    note_relaxed_load(address);
    scheduler->atomics[reinterpret_cast<uintptr_t>(address)].join(self().fiber->fenced);
}
void note_fence() {
    Fiber& f = *self().fiber;
    learn(f.coming);
    f.coming.of.clear();
    f.fenced.of.clear();
    tell(f.fenced);
}

void AsyncGroups::commit() { ends.push_back(time++); }
uint32_t AsyncGroups::done(int groups_left) const {
    const int n = int(ends.size()) - groups_left;
    return n > 0 ? ends[size_t(n) - 1] : 0;
}

// ---- accesses -------------------------------------------------------------------------------------------------------
static std::string name_of(const Touch& touch) {
    const std::string& name = scheduler->agents[touch.agent];
    if (!name.empty()) return name;
    for (auto& block : scheduler->blocks)
        for (auto& f : block->fibers)
            if (f->agent == touch.agent) return place(f->thread);
    return "a thread of a block that has ended";
}
[[noreturn]] static void fail_race(const Touch& now, const Touch& then, const std::string& where) {
    static constexpr const char* kNow[] = {"load", "store", "atomic"};
    static constexpr const char* kThen[] = {"loaded", "stored", "changed by an atomic"};
    fail("race: a %s by %s at %s, which %s %s, and nothing orders the two\n  and the other at %p",
         kNow[int(now.access)], name_of(now).c_str(), where.c_str(), name_of(then).c_str(), kThen[int(then.access)],
         then.line);
}
// Stores of the same value may meet: threads that clear the same bytes each wait for their own store only. Of several
// stores to a byte that are still listed all but the first were such, so that a load need know but one of them.
static bool conflict(const Touch& now, const Touch& then) {
    if (now.same) return then.access == Access::atomic;
    return now.access != then.access || now.access == Access::store;
}

static std::string place_in_tensors(uintptr_t address) {
    const Options& o = scheduler->launch->options;
    for (uint32_t i = 0; i < o.num_ranges; i++) {
        const auto begin = reinterpret_cast<uintptr_t>(o.ranges[i].begin);
        if (address >= begin && address < reinterpret_cast<uintptr_t>(o.ranges[i].end))
            return "byte " + std::to_string(address - begin) + " of " + o.ranges[i].name;
    }
    return "an address outside every tensor";
}
// An access to some bytes of a word, which have the value `there` and get `from` if it is not null; where(): in words
template <class Where>
static void touch_word(std::vector<Touch>& word, Touch now, const Clocks& known, const uint8_t* there,
                       const uint8_t* from, size_t size, Where where) {
    if (from) {
        uint8_t left = now.bytes;  // that nobody has stored yet
        for (const Touch& then : word)
            if (then.access == Access::store) left &= ~then.bytes;
        now.same = !left && !std::memcmp(there, from, size);
    }
    uint8_t stored = 0;  // bytes of which it knows a store
    if (now.access == Access::load)
        for (const Touch& then : word)
            if (then.access == Access::store && known.knows(then.agent, then.time)) stored |= then.bytes;
    size_t kept = 0;
    for (Touch& then : word) {
        if (then.bytes & now.bytes) {
            const bool ordered = known.knows(then.agent, then.time);
            const bool asked = then.access != Access::store || (then.bytes & now.bytes & ~stored);
            if (!ordered && asked && conflict(now, then)) fail_race(now, then, where());
            // Whoever is ordered after this access is so after what came before it. But a load need not know of a store
            // that changed nothing.
            const bool covered = now.same ? then.same : now.access == Access::store || now.access == then.access;
            if (ordered && covered) then.bytes &= ~now.bytes;
        }
        if (then.bytes) word[kept++] = then;
    }
    word.resize(kept);
    word.push_back(now);
}
// each(address of a word's first byte that is touched, how many, the bytes as bits)
template <class Each> static void each_word(uintptr_t address, size_t size, Each each) {
    for (uintptr_t at = address; at < address + size; at = at / 4 * 4 + 4) {
        const size_t first = at % 4, end = std::min<size_t>(4, first + (address + size - at));
        each(at, end - first, uint8_t((1u << end) - (1u << first)));
    }
}
void touch_shared(Block& block, uint32_t address, uint32_t size, Touch now, const Clocks& known, const void* from) {
    const uint8_t* shared = block.fibers[0]->thread.shared;
    each_word(address, size, [&](uintptr_t at, size_t count, uint8_t bytes) {
        now.bytes = bytes;
        touch_word(block.words[at / 4], now, known, shared + at,
                   from ? static_cast<const uint8_t*>(from) + (at - address) : nullptr, count,
                   [&] { return "shared offset " + std::to_string(at); });
    });
}
void touch_global(const void* address, size_t size, Access access, const void* from, const void* line) {
    const Fiber& f = *self().fiber;
    const auto begin = reinterpret_cast<uintptr_t>(address);
    each_word(begin, size, [&](uintptr_t at, size_t count, uint8_t bytes) {
        touch_word(scheduler->words[at / 4], {line, f.agent, f.known.of[f.agent], access, false, bytes}, f.known,
                   reinterpret_cast<const uint8_t*>(at),
                   from ? static_cast<const uint8_t*>(from) + (at - begin) : nullptr, count,
                   [&] { return place_in_tensors(at); });
    });
}
static void touch_here(uint32_t address, size_t size, Access access, const void* line, const void* from = nullptr) {
    Fiber& f = *self().fiber;
    touch_shared(*self().block, address, uint32_t(size), {line, f.agent, f.known.of[f.agent], access}, f.known, from);
}
void note_load(uint32_t address, size_t size, const void* line) {
    touch_here(address, size, Access::load, line ? line : __builtin_return_address(0));
}
void note_store(uint32_t address, const void* from, size_t size, const void* line) {
    touch_here(address, size, Access::store, line ? line : __builtin_return_address(0), from);
}
// Atomics order each other, and what comes before one of them before what comes after a later one.
void note_atomic(uint32_t address) {
    Clocks& place = self().block->atomics[address];
    learn(place);
    touch_here(address, 4, Access::atomic, __builtin_return_address(0));
    tell(place);
}
void touch_beside(uint32_t address, uint32_t size, Access access, uint32_t agent, uint32_t time, const void* line) {
    if (address + size > self().shared_bytes) fail_shared(address, size);
    touch_shared(*self().block, address, size, {line, agent, time, access}, self().fiber->known);
}

}  // namespace emu
