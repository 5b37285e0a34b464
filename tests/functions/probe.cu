// A function at given indices, and its interval over given boxes of them: what the tests compare with torch.
#include "common/functions.cuh"

struct ProbeArgs {
    const int* indices;   // (count, 4): b, h, q, k
    const float* scores;  // (count,)
    int* mask;
    float* score;
    const int* boxes;  // (boxes, 4, 2): the first and last b, h, q, k
    double* seen;      // (boxes, 2)
    int count, num_boxes;
    float scale;
};

extern "C" __global__ void probe(const ProbeArgs args, const Function function) {
    const Global<const int> indices{args.indices}, boxes{args.boxes};
    for (int i = threadIdx.x; i < args.count; i += blockDim.x) {
        const int b = indices[4 * i], h = indices[4 * i + 1], q = indices[4 * i + 2], k = indices[4 * i + 3];
        Global<int>{args.mask}[i] = function.mask(b, h, q, k, float(q), float(k));
        const float s = Global<const float>{args.scores}[i];
        Global<float>{args.score}[i] = function.score(s, args.scale, b, h, q, k, float(q), float(k));
    }
    for (int i = threadIdx.x; i < args.num_boxes; i += blockDim.x) {
        Interval range[4];
        for (int n = 0; n < 4; n++) range[n] = {double(boxes[8 * i + 2 * n]), double(boxes[8 * i + 2 * n + 1])};
        const Interval seen = function.seen(range[0], range[1], range[2], range[3]);
        Global<double>{args.seen}[2 * i] = seen.low;
        Global<double>{args.seen}[2 * i + 1] = seen.high;
    }
}
