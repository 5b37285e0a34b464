// What hardware would have paid for: sectors of global memory, passes over the banks of shared memory.
#include "emulator/runtime/engine.h"

namespace emu {

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
void tally(Block& block, Counters& c) {
    for (auto& [_, r] : block.global_requests) {
        std::vector<uint64_t> sectors;
        for (uint32_t l = 0; l < 32; l++) {
            if (!(r.lanes >> l & 1)) continue;
            for (uint64_t a = r.address[l] / 32; a <= (r.address[l] + r.size - 1) / 32; a++) sectors.push_back(a);
        }
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
void add(Counters& total, const Counters& c) {
    auto* t = reinterpret_cast<uint64_t*>(&total);
    auto* s = reinterpret_cast<const uint64_t*>(&c);
    for (size_t i = 0; i < sizeof(Counters) / sizeof(uint64_t); i++) t[i] += s[i];
}

}  // namespace emu
