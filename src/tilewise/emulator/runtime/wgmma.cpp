// wgmma: operands through descriptors, groups, and what must be fenced before it.
#include "emulator/runtime/engine.h"

namespace emu {

// Element (mn, k) of an operand of `size`-byte elements in shared memory, through a descriptor: start address,
// leading and stride byte offsets in units of 16 bytes, the swizzle in the top two bits. The layouts are the
// hardware's canonical ones; in all of them 16 bytes along k, or along mn if it is MN-major, lie together.
static uint32_t operand_address(uint64_t descriptor, bool mn_major, uint32_t mn, uint32_t k, uint32_t size) {
    uint32_t start = uint32_t(descriptor & 0x3fff) << 4, leading = uint32_t(descriptor >> 16 & 0x3fff) << 4;
    uint32_t stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
    static constexpr uint32_t kSpan[4] = {16, 128, 64, 32};  // bytes a swizzle repeats after; 16: none
    const uint32_t span = kSpan[descriptor >> 62], unit = 16 / size;
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
// each(address, mn, k) of all 16 bytes of rows [first, first + count) of an operand, K being 32 bytes
template <class F>
static void walk_operand(uint64_t descriptor, bool mn_major, uint32_t first, uint32_t count, uint32_t size, F each) {
    if (mn_major)
        for (uint32_t k = 0; k < 16; k++)
            for (uint32_t mn = first; mn < first + count; mn += 8)
                each(operand_address(descriptor, true, mn, k, size), mn, k);
    else
        for (uint32_t mn = first; mn < first + count; mn++)
            for (uint32_t k = 0; k < 32 / size; k += 16 / size)
                each(operand_address(descriptor, false, mn, k, size), mn, k);
}
// put(mn, k, value) of all elements of the same
template <class T, class F>
static void load_operand(uint64_t descriptor, bool mn_major, uint32_t first, uint32_t count, F put) {
    walk_operand(descriptor, mn_major, first, count, sizeof(T), [&](uint32_t address, uint32_t mn, uint32_t k) {
        T x[16 / sizeof(T)];
        check_shared(address, 16);
        std::memcpy(x, self().shared + address, 16);
        for (uint32_t i = 0; i < 16 / sizeof(T); i++)
            if (mn_major) put(mn + i, k, to_float(x[i]));
            else put(mn, k + i, to_float(x[i]));
    });
}
static uint32_t element_bytes(const WgmmaOp& op) { return op.type == Type::e4m3 ? 1 : 2; }
static uint32_t first_row() { return uint32_t(self().warp % 4) * 16; }

// A warp's rows: d (16 × n) = a (16 × K) b (K × n) [+ d], K being 32 bytes. Lane l holds of d: rows l / 4 and l / 4 +
// 8, columns in pairs; of a: the same rows, four bytes of each half of K.
template <class T> static void run_as(const WgmmaOp* const* ops) {
    const WgmmaOp& op = *ops[0];
    constexpr int kSize = sizeof(T), kDepth = 32 / kSize, kInWord = 4 / kSize;
    auto& a = scheduler->wgmma_a;
    auto& b = scheduler->wgmma_b;
    if (!op.a_in_registers)
        load_operand<T>(op.a_desc, op.a_mn_major, first_row(), 16,
                        [&](uint32_t m, uint32_t k, float x) { a[m % 16][k] = x; });
    for (int l = 0; l < 32 && op.a_in_registers; l++)
        for (int i = 0; i < 4; i++)
            for (int h = 0; h < kInWord; h++) {
                T x;
                std::memcpy(&x, reinterpret_cast<const uint8_t*>(&ops[l]->a[i]) + h * kSize, kSize);
                a[l / 4 + 8 * (i % 2)][l % 4 * kInWord + h + kDepth / 2 * (i / 2)] = to_float(x);
            }
    load_operand<T>(op.b_desc, op.b_mn_major, 0, uint32_t(op.n), [&](uint32_t n, uint32_t k, float x) { b[k][n] = x; });
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
static void run(const WgmmaOp* const* ops) {
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
    if (op.type == Type::e4m3) run_as<e4m3>(ops);
    else if (op.type == Type::bf16) run_as<bf16>(ops);
    else run_as<half>(ops);
}

// wgmma runs beside the thread's own code, so a fence must lie between its registers' last ordinary access and the
// wgmma. That access is not seen here, but where it can be is known: accumulators may be touched after every wait, A
// fragments at any time.
void wgmma_fence() { self().fiber->accumulators_fenced = self().fiber->fragments_fenced = true; }
void wgmma_issue(const WgmmaOp& op) {
    Fiber& f = *self().fiber;
    if (!f.accumulators_fenced) fail("wgmma without a wgmma_fence since the accumulators were free to be touched");
    if (op.a_in_registers && !f.fragments_fenced)
        fail("wgmma of an A in registers, which may have been touched since the last group, without a wgmma_fence");
    if ((op.a_mn_major || op.b_mn_major) && op.type == Type::e4m3)
        fail("wgmma of an operand that is MN-major, which only 16-bit ones may be");
    if (self().lane == 0) {  // operands are shared: one lane looks for the warp, one warp for the warpgroup
        const auto check = [](uint32_t address, uint32_t, uint32_t) { check_async_access(address, 16, "wgmma"); };
        if (!op.a_in_registers) walk_operand(op.a_desc, op.a_mn_major, first_row(), 16, element_bytes(op), check);
        if (self().warp % 4 == 0) walk_operand(op.b_desc, op.b_mn_major, 0, uint32_t(op.n), element_bytes(op), check);
    }
    if (self().watched && self().lane == 0) {
        uint32_t& agent = self().block->multipliers[size_t(self().warp)];
        if (!agent) agent = add_agent(*self().block, "the wgmma of the warp of " + place(self()));
        const void* line = __builtin_return_address(0);
        const auto touch = [&](uint32_t address, uint32_t, uint32_t) {
            touch_beside(address, 16, Access::load, agent, f.multiplied.time, line);
        };
        if (!op.a_in_registers) walk_operand(op.a_desc, op.a_mn_major, first_row(), 16, element_bytes(op), touch);
        walk_operand(op.b_desc, op.b_mn_major, 0, uint32_t(op.n), element_bytes(op), touch);
    }
    f.wgmma.back().ops.push_back(op);
}
static void run_oldest_group() {
    Fiber& f = *self().fiber;
    meet(f.wgmma.front(), "wgmma", [](WgmmaGroup* const* groups) {
        for (size_t i = 0; i < groups[0]->ops.size(); i++) {
            const WgmmaOp* ops[32];
            for (int l = 0; l < 32; l++) {
                if (groups[l]->ops.size() != groups[0]->ops.size())
                    fail("lanes of one warp issued different numbers of wgmma");
                ops[l] = &groups[l]->ops[i];
            }
            run(ops);
        }
    });
    f.wgmma.pop_front();
}
void wgmma_commit() {
    Fiber& f = *self().fiber;
    f.fragments_fenced = false;
    f.wgmma.emplace_back();
    f.multiplied.commit();
    if (!late())
        while (f.wgmma.size() > 1) run_oldest_group();
}
void wgmma_wait(int groups_left) {
    Fiber& f = *self().fiber;
    f.accumulators_fenced = f.fragments_fenced = false;
    while (int(f.wgmma.size()) - 1 > groups_left) run_oldest_group();
    const uint32_t agent = self().block->multipliers[size_t(self().warp)];
    if (self().watched && agent) f.known.raise(agent, f.multiplied.done(groups_left));
}

}  // namespace emu
