// Rendezvous of a warp's lanes, named barriers, mbarriers.
#include "emulator/runtime/engine.h"

namespace emu {

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
    scheduler->wake_all(m.waiting);
}
void sync_warp() {
    release();
    Fiber* slot = self().fiber;
    meet(slot, "__syncwarp", [](Fiber** const* lanes) {
        if (!self().watched) return;
        Clocks all;
        for (int l = 0; l < 32; l++) all.join((*lanes[l])->known);
        for (int l = 0; l < 32; l++) {
            Fiber& f = **lanes[l];
            f.known = all;
            f.known.of[f.agent]++;
        }
    });
}

static void barrier_reach(NamedBarrier& b, int id, int count) {
    if (b.arrived && b.count != count)
        fail("barrier %d is used with %d threads here and %d elsewhere", id, count, b.count);
    release();
    if (self().watched) tell(*b.known);
    b.count = count;
    b.arrived++;
}
static bool barrier_open(NamedBarrier& b) {
    if (b.arrived < b.count) return false;
    b.arrived = 0;
    b.voted = std::exchange(b.votes, 0);
    if (self().watched) b.known = std::make_shared<Clocks>();
    scheduler->wake_all(b.waiting);
    return true;
}
void barrier_sync(int id, int count) {
    NamedBarrier& b = self().block->barriers[id];
    if (counters) counters->barriers++;
    barrier_reach(b, id, count);
    const std::shared_ptr<Clocks> phase = b.known;
    if (!barrier_open(b)) {
        b.waiting.push_back(self().fiber);
        suspend("barrier " + std::to_string(id) + " of " + std::to_string(count) + " threads");
    }
    if (self().watched) learn(*phase);
}
void barrier_arrive(int id, int count) {
    NamedBarrier& b = self().block->barriers[id];
    barrier_reach(b, id, count);
    barrier_open(b);
}
int barrier_count(int id, int count, bool x) {
    NamedBarrier& b = self().block->barriers[id];
    b.votes += x;
    barrier_sync(id, count);
    return b.voted;  // the next phase does not end before this thread has come to it
}

// ---- clusters -------------------------------------------------------------------------------------------------------
uint32_t address_in(uint32_t address, int rank) {
    if (rank < 0 || size_t(rank) >= self().block->cluster->blocks.size())
        fail("block %d of a cluster of %zu", rank, self().block->cluster->blocks.size());
    return kClusterAddress | uint32_t(rank) << kRankShift | address;
}
static void open_cluster(Cluster& c) {
    if (c.pending) return;
    c.phase++;
    c.pending = c.live;
    if (self().watched) c.known = std::make_shared<Clocks>();
    scheduler->wake_all(c.waiting);
}
void cluster_arrive() {
    Fiber& f = *self().fiber;
    Cluster& c = *self().block->cluster;
    if (f.cluster_arrived) fail("cluster_arrive twice without a cluster_wait between");
    f.cluster_arrived = true;
    f.cluster_phase = c.phase;
    f.cluster_known = c.known;
    if (self().watched) tell(*c.known);
    c.pending--;
    open_cluster(c);
}
void cluster_wait() {
    Fiber& f = *self().fiber;
    Cluster& c = *self().block->cluster;
    if (!f.cluster_arrived) fail("cluster_wait without a cluster_arrive before");
    while (c.phase == f.cluster_phase) {
        c.waiting.push_back(&f);
        suspend("the cluster's barrier");
    }
    f.cluster_arrived = false;
    f.met_cluster = true;
    if (self().watched) learn(*f.cluster_known);
}
void leave_cluster(Fiber& f) {
    Cluster& c = *f.thread.block->cluster;
    c.live--;
    if (!f.cluster_arrived || f.cluster_phase != c.phase) c.pending--;
    open_cluster(c);
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------
static Mbarrier& mbarrier(uint32_t address) {
    auto& all = self().block->mbarriers;
    auto found = all.find(address);
    if (found == all.end()) fail("mbarrier at shared offset %u was never initialised", address);
    return found->second;
}
static void settle(Mbarrier& b) {
    if (b.pending || b.bytes) return;
    b.ended = b.known;
    b.pending = b.expected;
    b.phase ^= 1;
    scheduler->wake_all(b.waiting);
}
static void check_ready(const Mbarrier& b, uint32_t address) {
    if (self().watched && !self().fiber->known.knows(b.initialiser->fiber->agent, b.init_time))
        fail("race: the mbarrier at shared offset %u is used, which %s initialised, and nothing orders the two",
             address, place(*b.initialiser).c_str());
}
static void arrive(Mbarrier& b, uint32_t address, int count) {
    release();
    if ((b.pending -= count) < 0)
        fail("mbarrier at shared offset %u: more arrivals than its count of %d", address, b.expected);
    settle(b);
}
void mbarrier_init(uint32_t address, int count) {
    check_shared(address, 8);
    Mbarrier& b = self().block->mbarriers[address];
    b = Mbarrier{};
    b.pending = b.expected = count;
    b.initialiser = &self();
    b.init_fences = self().init_fences;
    if (self().watched) b.init_time = self().fiber->known.of[self().fiber->agent];
}
void mbarrier_arrive(uint32_t address, int count) {
    Mbarrier& b = mbarrier(address);
    check_ready(b, address);
    if (self().watched) tell(b.known);
    arrive(b, address, count);
}
void mbarrier_arrive_after(uint32_t address, uint32_t agent, uint32_t time) {
    Mbarrier& b = mbarrier(address);
    if (self().watched) b.known.raise(agent, time);
    arrive(b, address, 1);
}
void mbarrier_expect_tx(uint32_t address, int bytes) {
    mbarrier(address).bytes += bytes;
    mbarrier_arrive(address, 1);
}
void mbarrier_complete_tx(uint32_t address, int bytes, uint32_t agent, uint32_t time) {
    Mbarrier& b = mbarrier(address);
    if (self().watched) b.known.raise(agent, time);
    b.bytes -= bytes;
    settle(b);
}
std::pair<uint32_t, uint32_t> counted_copy(Block& block, uint32_t address) {
    const auto found = block.mbarriers.find(address);
    if (found == block.mbarriers.end()) fail("mbarrier at shared offset %u was never initialised", address);
    Mbarrier& b = found->second;
    check_ready(b, address);
    const std::string name = "the copies that the mbarrier at shared offset " + std::to_string(address) + " counts";
    if (!b.agent) b.agent = add_agent(block, name);
    return {b.agent, ++b.time};
}
void mbarrier_wait(uint32_t address, int parity) {
    if (counters) counters->mbarrier_waits++;
    Mbarrier& b = mbarrier(address);
    check_ready(b, address);
    while (b.phase == (parity & 1)) {
        b.waiting.push_back(self().fiber);
        suspend("mbarrier at shared offset " + std::to_string(address) + ", parity " + std::to_string(parity));
    }
    self().learned = self().block->announcements;
    if (self().watched) learn(b.ended);
}
void check_mbarrier_for_tma(uint32_t address) {
    const Mbarrier& b = mbarrier(address);
    if (b.initialiser->init_fences == b.init_fences)
        fail("TMA load on the mbarrier at shared offset %u, which %s initialised without a fence_mbarrier_init since",
             address, place(*b.initialiser).c_str());
}

}  // namespace emu
