// Copies that run beside the threads: cp.async, and TMA's boxes of a tensor.
#include "emulator/runtime/engine.h"

namespace emu {

// Bits 4 … of an address are exchanged with its bits 7 …: how TMA and wgmma spread rows over the banks.
uint32_t swizzled(uint32_t address, uint32_t span) {
    return span == 128 ? address ^ ((address >> 3) & 0x70) : span == 64 ? address ^ ((address >> 3) & 0x30)
           : span == 32 ? address ^ ((address >> 3) & 0x10) : address;
}

static uint32_t box_bytes(const TensorMap& m) {
    uint32_t bytes = m.element_bytes;
    for (uint32_t d = 0; d < m.rank; d++) bytes *= m.box[d];
    return bytes;
}
// Every 16 bytes of a box: each(shared memory, where they lie in the tensor, the first byte that is inside it, past
// the last).
template <class F> static void walk_box(const Box& box, F each) {
    const TensorMap& m = *box.map;
    const uint32_t row_bytes = m.box[0] * m.element_bytes, rows = box_bytes(m) / row_bytes;
    // Of a row, in bytes from the box's edge
    const int64_t start = int64_t(box.at[0]) * m.element_bytes, size = int64_t(m.size[0]) * m.element_bytes;
    for (uint32_t row = 0; row < rows; row++) {
        uint8_t* global = m.base + start;
        bool exists = true;
        for (uint32_t d = 1, rest = row; d < m.rank; rest /= m.box[d], d++) {
            const int64_t i = box.at[d] + int64_t(rest % m.box[d]);
            exists &= i >= 0 && uint64_t(i) < m.size[d];
            global += i * int64_t(m.stride[d - 1]);
        }
        for (uint32_t b = 0; b < row_bytes; b += 16) {
            const int64_t before = start + b;  // of the tensor's row
            const int64_t from = std::clamp<int64_t>(-before, 0, 16), to = std::clamp<int64_t>(size - before, 0, 16);
            const uint32_t address = swizzled(box.shared + row * row_bytes + b, m.swizzle);
            each(self().shared + address, global + b, size_t(from), exists ? size_t(std::max(from, to)) : size_t(from));
        }
    }
    if (counters) counters->async_bytes += box_bytes(m);
}

void Copy::land() const {
    Thread* running = current;
    current = issuer;
    if (kind == cp_async) {
        uint8_t* shared = mark_stored(to, 16);
        if (bytes) std::memcpy(shared, from, size_t(bytes));
        std::memset(shared + bytes, 0, size_t(16 - bytes));
    } else if (kind == cp_async_arrive) {
        for (const Copy& c : before) c.land();
        const uint32_t mark = ++issuer->block->announcements * kMarkStep;
        for (const uint32_t address : announced) std::fill_n(issuer->stored + address / 4, 4, mark);
        mbarrier_arrive_after(box.barrier, agent, time);
    } else if (kind == load) {
        walk_box(box, [](uint8_t* shared, const uint8_t* global, size_t first, size_t end) {
            std::memset(shared, 0, 16);
            if (first < end) std::memcpy(shared + first, global + first, end - first);
        });
        mbarrier_complete_tx(box.barrier, int(box_bytes(*box.map)), agent, time);
    } else if (kind == cluster_store) {
        std::memcpy(issuer->shared + to, word, size_t(bytes));
        mbarrier_complete_tx(box.barrier, bytes, agent, time);
    } else if (kind == bulk_load) {
        std::memcpy(issuer->shared + to, from, size_t(bytes));
        mbarrier_complete_tx(box.barrier, bytes, agent, time);
    } else if (kind == bulk_add) {  // blocks on other threads may add there too
        for (int i = 0; i < bytes / 4; i++) {
            float x, *sum = const_cast<float*>(static_cast<const float*>(from)) + i;
            std::memcpy(&x, issuer->shared + to + 4 * i, 4);
            std::atomic_ref<float>(*sum).fetch_add(x, std::memory_order_relaxed);
        }
    } else {
        walk_box(box, [](const uint8_t* shared, uint8_t* global, size_t first, size_t end) {
            if (first < end) std::memcpy(global + first, shared + first, end - first);
        });
    }
    current = running;
}
void land_all(std::vector<Copy>& work) {
    for (auto& c : work) c.land();
    work.clear();
}
static void wait_for(std::deque<std::vector<Copy>>& groups, int groups_left) {
    while (int(groups.size()) - 1 > groups_left) {
        land_all(groups.front());
        groups.pop_front();
    }
}

// ---- for races ----------------------------------------------------------------------------------------------------
// An access by what the running thread commits in groups
static void touch_by(AsyncGroups& groups, const char* what, uint32_t address, uint32_t size, Access access,
                     const void* line) {
    touch_beside(address, size, access, agent_of(groups.agent, what), groups.time, line);
}
static void learn_of(const AsyncGroups& groups, int groups_left) {
    if (self().watched && groups.agent) self().fiber->known.raise(groups.agent, groups.done(groups_left));
}
// A copy to shared memory of a block, counted by the mbarrier that it names
static void count_on_mbarrier(Copy& c, Block& block, uint32_t address, uint32_t size, const void* line) {
    std::tie(c.agent, c.time) = counted_copy(block, c.box.barrier);
    touch_shared(block, address, size, {line, c.agent, c.time, Access::store}, self().fiber->known);
}

// ---- cp.async -----------------------------------------------------------------------------------------------------
void copy_async_16(uint32_t to, const void* from, int bytes) {
    if (bytes) check_global(from, size_t(bytes) == 16 ? 16 : 1, Access::load);
    if (counters) counters->async_bytes += uint64_t(bytes);
    check_shared(to, 16);
    check_overwrite(to, 16, "cp.async");
    if (self().watched) touch_by(self().fiber->copied, "cp.async", to, 16, Access::store, __builtin_return_address(0));
    const Copy c{Copy::cp_async, current, {}, to, from, bytes, {}};
    self().fiber->unannounced.push_back(to);
    if (late()) self().fiber->copies.back().push_back(c);
    else c.land();
}
void copy_async_commit() {
    self().fiber->copies.emplace_back();
    self().fiber->copied.commit();
}
void copy_async_wait(int groups_left) {
    wait_for(self().fiber->copies, groups_left);
    if (groups_left == 0) self().fiber->unannounced.clear();
    learn_of(self().fiber->copied, groups_left);
}
void copy_async_arrive(uint32_t barrier) {
    Copy c{Copy::cp_async_arrive, current, {}, 0, nullptr, 0, {}};
    c.box.barrier = barrier;
    c.announced.swap(self().fiber->unannounced);
    for (auto& group : self().fiber->copies) {  // none of them waits for the thread any more
        c.before.insert(c.before.end(), group.begin(), group.end());
        group.clear();
    }
    if (self().watched) {
        AsyncGroups& copied = self().fiber->copied;
        c.agent = agent_of(copied.agent, "cp.async");
        c.time = copied.time++;  // what is asked for later is not of it
    }
    if (late()) scheduler->in_flight.push_back(c);
    else c.land();
}

// ---- TMA ----------------------------------------------------------------------------------------------------------
static Box make_box(uint32_t shared, const TensorMap* map, uint32_t barrier, const int* at, int rank,
                    const char* what) {
    if (rank != int(map->rank)) fail("%s with %d coordinates of a tensor map of rank %u", what, rank, map->rank);
    if (shared % 128) fail("%s at shared offset %u, which is not aligned to 128 bytes", what, shared);
    if (map->box[0] * map->element_bytes % 16) fail("%s of a box whose rows are not a multiple of 16 bytes", what);
    Box box{shared, map, barrier, {}};
    std::copy(at, at + rank, box.at);
    check_async_access(shared, box_bytes(*map), what);
    return box;
}
void tma_load(uint32_t to, const TensorMap* map, uint32_t barrier, const int* at, int rank) {
    Copy c{Copy::load, current, make_box(to, map, barrier, at, rank, "TMA load"), 0, nullptr, 0, {}};
    check_overwrite(to, box_bytes(*map), "TMA load");
    check_mbarrier_for_tma(barrier);
    if (self().watched) count_on_mbarrier(c, *self().block, to, box_bytes(*map), __builtin_return_address(0));
    if (late()) scheduler->in_flight.push_back(c);
    else c.land();
}
void tma_store(const TensorMap* map, uint32_t from, const int* at, int rank) {
    for (int d = 0; d < rank; d++)
        if (at[d] < 0) fail("TMA store at a negative coordinate, which a card refuses as an illegal instruction");
    const Copy c{Copy::store, current, make_box(from, map, 0, at, rank, "TMA store"), 0, nullptr, 0, {}};
    if (self().watched)
        touch_by(self().fiber->stored, "TMA stores", from, box_bytes(*map), Access::load, __builtin_return_address(0));
    if (late()) self().fiber->stores.back().push_back(c);
    else c.land();
}

// ---- stores to other blocks of the cluster --------------------------------------------------------------------------
void store_async(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    const uint32_t rank = to & kClusterAddress ? to << 1 >> (kRankShift + 1) : self().block->rank;
    if ((to ^ barrier) >> kRankShift) fail("store_async to one block of the cluster and the mbarrier of another");
    if (rank != self().block->rank && !self().fiber->met_cluster)
        fail("store_async to block %u of the cluster, which may not have begun: no cluster_wait before it", rank);
    Block* block = self().block->cluster->blocks[rank];
    if (!block || !block->live) fail("store_async to block %u of the cluster, which has ended", rank);
    const uint32_t offset = to & ((1u << kRankShift) - 1);
    check_shared(offset, size_t(bytes));
    if (counters) counters->async_bytes += uint64_t(bytes);
    Copy c{Copy::cluster_store, &block->fibers[0]->thread, {}, offset, nullptr, bytes, {}};
    c.box.barrier = barrier & ((1u << kRankShift) - 1);
    std::memcpy(c.word, from, size_t(bytes));
    if (self().watched) count_on_mbarrier(c, *block, offset, uint32_t(bytes), __builtin_return_address(0));
    if (late()) scheduler->in_flight.push_back(c);
    else c.land();
}

// ---- bytes that lie together ----------------------------------------------------------------------------------------
static void check_bulk(const void* global, uint32_t shared, int bytes, Access access, const char* what) {
    if (bytes % 16) fail("%s of %d bytes, which are no multiple of 16", what, bytes);
    for (int i = 0; i < bytes; i += 16) check_global(static_cast<const uint8_t*>(global) + i, 16, access);
    check_shared(shared, 16);
    check_async_access(shared, uint32_t(bytes), what);
    if (counters) counters->async_bytes += uint64_t(bytes);
}
void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    check_bulk(from, to, bytes, Access::load, "bulk load");
    check_overwrite(to, uint32_t(bytes), "bulk load");
    check_mbarrier_for_tma(barrier);
    Copy c{Copy::bulk_load, current, {}, to, from, bytes, {}};
    c.box.barrier = barrier;
    if (self().watched) count_on_mbarrier(c, *self().block, to, uint32_t(bytes), __builtin_return_address(0));
    if (late()) scheduler->in_flight.push_back(c);
    else c.land();
}
void bulk_add(float* to, uint32_t from, int bytes) {
    check_bulk(to, from, bytes, Access::atomic, "bulk add");
    const Copy c{Copy::bulk_add, current, {}, from, to, bytes, {}};
    if (self().watched)
        touch_by(self().fiber->stored, "bulk adds", from, uint32_t(bytes), Access::load, __builtin_return_address(0));
    if (late()) self().fiber->stores.back().push_back(c);
    else c.land();
}

void bulk_commit() {
    self().fiber->stores.emplace_back();
    self().fiber->stored.commit();
}
void bulk_wait(int groups_left) {
    wait_for(self().fiber->stores, groups_left);
    learn_of(self().fiber->stored, groups_left);
}

}  // namespace emu
