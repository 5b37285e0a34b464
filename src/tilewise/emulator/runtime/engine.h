// What the parts of the runtime share: fibers, blocks, the scheduler, the launch.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/types.h"

extern "C" void emu_switch(void** save, void* load);  // fibers.cpp

namespace emu {

constexpr size_t kStackBytes = 256 << 10;

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
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* s = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (s == MAP_FAILED) {
            std::fputs("tilewise emulator: no memory for fiber stacks\n", stderr);
            std::abort();
        }
        return static_cast<uint8_t*>(s);
    }
};

// ---- races: races.cpp -----------------------------------------------------------------------------------------------
struct Clocks {
    std::vector<uint32_t> of;  // by agent: up to which of its times everything is known; 0 for what is not listed
    void join(const Clocks& other);
    void raise(uint32_t agent, uint32_t time);
    bool knows(uint32_t agent, uint32_t time) const { return agent < of.size() && of[agent] >= time; }
};
struct Touch {  // an access to bytes of a word of shared memory
    const void* line;  // of the kernel: a return address
    uint32_t agent, time;
    Access access;
    bool same = false;  // a store of what is there already
    uint8_t bytes = 0;  // a bit each
};
// The groups of asynchronous work that a thread commits and waits for, by the times of their agent
struct AsyncGroups {
    uint32_t agent = 0;  // 0 until there is one: that is a thread's
    uint32_t time = 1;   // of the open group
    std::vector<uint32_t> ends = {};  // the times of those that were committed
    void commit();
    uint32_t done(int groups_left) const;  // the time up to which all is done when so many groups are left
};

// One asynchronous copy that has not landed. The issuer is the thread whose block and shared memory it works on.
struct Box {
    uint32_t shared;
    const TensorMap* map;
    uint32_t barrier;
    int at[5];
};
struct Copy {
    enum Kind { cp_async, cp_async_arrive, load, store, cluster_store, bulk_load, bulk_add } kind;
    Thread* issuer;    // of a cluster_store: a thread of the block that it goes to
    Box box;           // of TMA; of a cluster_store, a bulk_load and a cp_async_arrive their barrier
    uint32_t to;       // the place in shared memory, but for TMA's
    const void* from;
    int bytes;
    uint32_t word[2];  // of a cluster_store
    std::vector<Copy> before = {};  // of a cp_async_arrive: what lands first
    std::vector<uint32_t> announced = {};  // and the places of all that it tells of
    uint32_t agent = 0, time = 0;   // of what its mbarrier counts, for races
    void land() const;
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
    // What ordinary code may have touched since the last wgmma_fence: accumulators after a wait, A fragments after a
    // commit
    bool accumulators_fenced = false, fragments_fenced = false;
    std::string waiting;                            // what it waits on, for the deadlock report
    std::deque<std::vector<Copy>> copies{1};        // cp.async groups; the last is open
    std::vector<uint32_t> unannounced;              // where copies went that no wait or arrival has covered
    std::deque<std::vector<Copy>> stores{1};        // bulk store groups
    std::deque<WgmmaGroup> wgmma{1};
    bool cluster_arrived = false;                   // at the cluster's barrier, and has not waited there since
    uint32_t cluster_phase = 0;                     // the barrier's phase that it arrived in
    bool met_cluster = false;                       // it has waited there: all blocks have begun
    std::shared_ptr<Clocks> cluster_known = {};     // of that phase, for races
    std::unordered_map<const void*, uint32_t> occurrences;  // of each counted call site
    uint32_t agent = 0;                             // for races: itself,
    Clocks known = {};                              // what it has synchronised with,
    Clocks fenced = {}, coming = {};                // what it knew at its last fence, and will know at the next
    AsyncGroups copied = {}, stored = {}, multiplied = {};  // its cp.async, bulk stores and its warp's wgmma
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
    int votes = 0, voted = 0;  // arrived with true; those of the phase that ended last
    std::vector<Fiber*> waiting;
    std::shared_ptr<Clocks> known = std::make_shared<Clocks>();  // in this phase, for races
};
struct Mbarrier {
    int pending = 0, expected = 0;
    int64_t bytes = 0;
    int phase = 0;
    Thread* initialiser = nullptr;
    uint32_t init_fences = 0;  // of the initialiser, then
    std::vector<Fiber*> waiting;
    // For races: when it was initialised, what those that arrived knew, and what they did when the last phase ended;
    // and of the copies that it counts
    uint32_t init_time = 0;
    Clocks known = {}, ended = {};
    uint32_t agent = 0, time = 0;
};
struct Request {
    uint64_t address[32];  // by lane
    uint32_t size, lanes;  // lanes: a bit each
};

struct Scheduler;
struct Block;
struct Cluster {
    std::vector<Block*> blocks;    // by rank
    uint32_t phase = 0;            // of its barrier
    unsigned live = 0;             // threads that have not ended
    unsigned pending = 0;          // those of them that have yet to arrive in this phase
    std::vector<Fiber*> waiting;
    std::shared_ptr<Clocks> known = std::make_shared<Clocks>();  // at its barrier, in this phase, for races
};
struct Block {
    std::shared_ptr<Cluster> cluster;
    uint32_t rank = 0;
    Scheduler* scheduler;
    dim3 index;
    std::vector<uint8_t> arena;
    std::vector<uint32_t> stored, loaded;  // marks, see Thread
    uint32_t announcements = 0;            // cp_async_arrive that have landed
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Meeting> warps;
    std::vector<Warpgroup> warpgroups;
    std::map<int, NamedBarrier> barriers;
    std::map<uint32_t, Mbarrier> mbarriers;
    std::map<std::pair<const void*, std::pair<int, uint32_t>>, Request> global_requests, shared_requests;
    unsigned live = 0;
    std::vector<std::vector<Touch>> words;         // for races: by 4 bytes of shared memory, the accesses that count
    std::map<uint32_t, Clocks> atomics;
    std::vector<uint32_t> multipliers;             // agents of the warps' wgmma
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
    std::deque<Copy> in_flight;      // TMA loads that have not landed
    Fiber* running = nullptr;
    bool yielded = false;            // the fiber that ran last gave up its turn: it waits for another in a loop
    uint64_t idle = 0;               // turns in a row that ended so
    void* sp = nullptr;
    uint64_t random;
    Counters counted{};
    // For races, of all blocks since there was none: the agents' names, "" of threads, and global memory by 4 bytes
    std::vector<std::string> agents;
    std::unordered_map<uintptr_t, std::vector<Touch>> words;
    std::unordered_map<uintptr_t, Clocks> atomics;
    // A warp's operands while they are multiplied: a by row and k, b by k and column
    float wgmma_a[16][32], wgmma_b[32][256];

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
    void wake_all(std::vector<Fiber*>& waiting) {
        for (Fiber* f : waiting) wake(f);
        waiting.clear();
    }
    Fiber* pick();
    void land();                     // one of the copies in flight
    void switch_to(Fiber* f);
};
extern constinit thread_local Scheduler* scheduler;
inline bool late() { return scheduler->launch->options.late; }

void suspend(std::string why);       // until somebody wakes this fiber
void prepare(Fiber& f);              // its stack, so that the first switch to it enters the kernel
void report(Launch* launch, const std::string& text);
std::string place(const Thread& t);
void land_all(std::vector<Copy>& work);
void check_mbarrier_for_tma(uint32_t address);
// By what works beside threads, whose agent and time come with it: an arrival, and bytes that have come
void mbarrier_arrive_after(uint32_t address, uint32_t agent, uint32_t time);
void mbarrier_complete_tx(uint32_t address, int bytes, uint32_t agent, uint32_t time);
void leave_cluster(Fiber& f);        // its thread has ended
uint32_t swizzled(uint32_t address, uint32_t span);
void tally(Block& block, Counters& c);
void add(Counters& total, const Counters& c);

// Races. All but `watch` belong where self().watched.
void watch(Block& block);                            // from its beginning
uint32_t add_agent(Block& block, std::string name);
uint32_t agent_of(uint32_t& agent, const char* what);  // of the running thread, one of whose agents this is
void tell(Clocks& to);                               // a release: what the running thread knows
void learn(const Clocks& from);                      // an acquire
// An access by an agent beside the threads, which the running thread asks for
void touch_beside(uint32_t address, uint32_t size, Access access, uint32_t agent, uint32_t time, const void* line);
// from: what an ordinary store is about to put there
void touch_shared(Block& block, uint32_t address, uint32_t size, Touch now, const Clocks& known,
                  const void* from = nullptr);
void touch_global(const void* address, size_t size, Access access, const void* from, const void* line);
// A copy to shared memory that the mbarrier there counts: its agent and time
std::pair<uint32_t, uint32_t> counted_copy(Block& block, uint32_t barrier);

// The async proxy is about to read or write bytes of shared memory: what ordinary stores left there must be fenced.
// `size` and `address` are multiples of 16.
void check_async_access(uint32_t address, uint32_t size, const char* what);
// A copy is about to write there: no other lane of this warp may still be loading it, as far as a barrier tells.
void check_overwrite(uint32_t address, uint32_t size, const char* what);

}  // namespace emu
