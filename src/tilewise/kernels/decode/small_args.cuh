// What decode_small.cu is told of its sequences besides DecodeArgs: tilewise.gpu.abi.SmallArgs is the mirror in Python.
#pragma once
#include "common/args.cuh"

constexpr int kMostSmall = 32;  // sequences of a launch
// It stands in the kernel's arguments, so that no load has to come back before the pages are looked up.
struct SmallSequence {
    int caller;      // the caller's number of the sequence
    int tail_from;   // PageTable
    Divisor piece;   // tokens per piece
    Divisor rounds;  // per piece
};
struct SmallArgs {
    SmallSequence of[kMostSmall];
};
