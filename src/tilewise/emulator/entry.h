// The way in from Python: unpacks the arguments and runs the kernel that TILEWISE_ENTRY names.
#pragma once
#include "emulator/runtime.h"

namespace emu {
template <class A> A argument(const void* p) {  // the bytes may lie less aligned than the type wants
    A x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
template <class... A, size_t... I> void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(argument<std::remove_const_t<A>>(args[I])...);
}
template <class... A> void call(void (*kernel)(A...), void** args) {
    call(kernel, args, std::index_sequence_for<A...>{});
}
}  // namespace emu

extern "C" int tilewise_emulate(const emu::Options* options, void** args, char* report, size_t size,
                                emu::Counters* counters) {
    return emu::launch(*options, [](void** a) { emu::call(&TILEWISE_ENTRY, a); }, args, report, size, counters);
}
