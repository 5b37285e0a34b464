// A function at given indices, and its intervals over given boxes of them: what the tests compare with torch.
#pragma once
#include "common/functions.cuh"

struct ProbeArgs {
    const int* indices;   // (count, 4): b, h, q, k
    const float* scores;  // (count,)
    const int* boxes;     // (boxes, 4, 2): the first and the last b, h, q, k
    int* mask;            // (functions, count)
    float* score;         // (functions, count)
    float* sided;         // (functions, count): the score as blocks on the key's side of the row have it
    double* seen;         // (functions, boxes, 2)
    int count, num_boxes;
    float scale;
};

template <int kSide, class Function>
TILE_DEVICE float sided(const Function& function, float s, float scale, int b, int h, int q, int k) {
    if constexpr (Function::kLine[kSide]) {
        const int begin = k / 2;  // any key
        const Line line = function.template line<kSide>(scale, b, h, q, begin, float(q), float(begin), q, 0, begin, 0);
        return s * line.factor + (line.base + line.step * float(k - begin));
    } else {
        return function.template score<kSide>(s, scale, b, h, q, k, float(q), float(k), q - 2, 2, k - 3, 3);
    }
}

template <class Function> TILE_DEVICE void probe(const ProbeArgs& args, const Function& function, int number) {
    const Global<const int> indices{args.indices}, boxes{args.boxes};
    for (int i = threadIdx.x; i < args.count; i += blockDim.x) {
        const int b = indices[4 * i], h = indices[4 * i + 1], q = indices[4 * i + 2], k = indices[4 * i + 3];
        const float s = Global<const float>{args.scores}[i];
        const int64_t at = int64_t(number) * args.count + i;
        const float fq = float(q), fk = float(k);
        Global<int>{args.mask}[at] = function.mask(b, h, q, k, fq, fk, q - 2, 2, k - 3, 3);
        Global<float>{args.score}[at] = function.score(s, args.scale, b, h, q, k, fq, fk, q - 2, 2, k - 3, 3);
        Global<float>{args.sided}[at] = k > q ? sided<kAfter>(function, s, args.scale, b, h, q, k)
                                              : sided<kBefore>(function, s, args.scale, b, h, q, k);
    }
    for (int i = threadIdx.x; i < args.num_boxes; i += blockDim.x) {
        Interval range[4];
        for (int n = 0; n < 4; n++) range[n] = {double(boxes[8 * i + 2 * n]), double(boxes[8 * i + 2 * n + 1])};
        const Interval seen = function.seen(range[0], range[1], range[2], range[3]);
        const int64_t at = int64_t(number) * args.num_boxes + i;
        Global<double>{args.seen}[2 * at] = seen.low;
        Global<double>{args.seen}[2 * at + 1] = seen.high;
    }
}
