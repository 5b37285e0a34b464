// Checks of every access to memory, and the reports of those that fail.
#include "emulator/runtime/engine.h"

#include <execinfo.h>

#include <cstdarg>

namespace emu {

// ---- reports ------------------------------------------------------------------------------------------------------
std::string place(const Thread& t) {
    char text[128];
    std::snprintf(text, sizeof text, "block (%u, %u, %u), thread (%u, %u, %u), warp %d lane %d", t.block_index.x,
                  t.block_index.y, t.block_index.z, t.thread_index.x, t.thread_index.y, t.thread_index.z, t.warp,
                  t.lane);
    return text;
}
void report(Launch* launch, const std::string& text) {
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

// ---- bounds -------------------------------------------------------------------------------------------------------
void fail_shared(uint32_t address, size_t size) {
    fail("shared memory access of %zu bytes at offset %u: the block has %u bytes", size, address, self().shared_bytes);
}
static void check_bounds(const void* address, size_t size, Access access) {
    auto* p = static_cast<const uint8_t*>(address);
    const Options& o = scheduler->launch->options;
    const char* verb = access == Access::load ? "read" : access == Access::store ? "write" : "atomic";
    for (uint32_t i = 0; i < o.num_ranges; i++)
        if (p >= o.ranges[i].begin && p + size <= o.ranges[i].end) {
            // A structure of three words is stored word by word: what has to be aligned is the power of two in it.
            if (uintptr_t(p) % (size & -size)) fail("global %s of %zu bytes is not aligned to them", verb, size);
            return;
        }
    const Range* nearest = nullptr;
    for (uint32_t i = 0; i < o.num_ranges; i++)
        if (p >= o.ranges[i].begin && (!nearest || o.ranges[i].begin > nearest->begin)) nearest = &o.ranges[i];
    if (nearest)
        fail("global %s of %zu bytes outside every tensor: %td bytes past the end of %s", verb, size,
             p + size - nearest->end, nearest->name);
    fail("global %s of %zu bytes outside every tensor, at %p", verb, size, address);
}
void check_global(const void* address, size_t size, Access access) {
    check_bounds(address, size, access);
    if (self().watched) touch_global(address, size, access, nullptr, __builtin_return_address(0));
}
void check_store(void* address, const void* from, size_t size) {
    check_bounds(address, size, Access::store);
    if (self().watched) touch_global(address, size, Access::store, from, __builtin_return_address(0));
}

// ---- order --------------------------------------------------------------------------------------------------------
static Thread& author(uint32_t mark) { return self().block->fibers[mark % kMarkStep - 1]->thread; }

// Of one word whose last ordinary store has this mark. A store is handed over by the storing thread's fence and then,
// unless that thread itself asks the async proxy, by one of its releases: a barrier or an arrival.
//
// Copies that an mbarrier was told of by themselves are handed over by whoever has waited for it, and fenced since.
static void check_store(uint32_t& mark, uint32_t address, const char* what) {
    if (mark % kMarkStep == 0) {
        if (self().fenced < mark / kMarkStep)
            fail("%s of 4 bytes at shared offset %u, which cp.async brought, without a fence_async_proxy after the wait "
                 "for the mbarrier that tells so", what, address);
        mark = 0;
        return;
    }
    const Thread& by = author(mark);
    const uint32_t fences = mark / kMarkStep;
    const bool fenced = fences < by.store_mark / kMarkStep;
    if (!fenced)
        fail("%s of 4 bytes at shared offset %u, which %s stored without a fence_async_proxy since", what, address,
             place(by).c_str());
    if (&by == &self()) return;  // it may still have to be released for others
    if (fences >= by.handed_over)
        fail("%s of 4 bytes at shared offset %u, which %s stored and fenced without a barrier or arrival since", what,
             address, place(by).c_str());
    mark = 0;  // handed over for good
}
void check_async_access(uint32_t address, uint32_t size, const char* what) {
    if (address + size > self().shared_bytes) fail_shared(address, size);
    uint32_t* marks = self().stored + address / 4;
    for (uint32_t i = 0; i < size / 4; i += 4) {
        uint64_t two[2];
        std::memcpy(two, marks + i, 16);
        if (!(two[0] | two[1])) continue;
        for (uint32_t j = i; j < i + 4; j++)
            if (marks[j]) check_store(marks[j], address + 4 * j, what);
    }
}
void check_overwrite(uint32_t address, uint32_t size, const char* what) {
    const uint32_t* marks = self().loaded + address / 16;
    for (uint32_t i = 0; i < size / 16; i++)
        if (marks[i] && marks[i] % kMarkStep != self().load_mark % kMarkStep) {
            const Thread& by = author(marks[i]);
            if (by.warp == self().warp && by.load_mark == marks[i])
                fail("%s over 16 bytes at shared offset %u, which %s loaded without a sync_warp or barrier since", what,
                     address + 16 * i, place(by).c_str());
        }
}

}  // namespace emu
