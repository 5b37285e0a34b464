// Global and shared memory as kernels see it: gK[i], sK[i]. On a card these are plain pointers. In the emulator every
// access is checked against the tensors and the block's shared memory, and counted.
#pragma once
#include "tile/ptx.cuh"

struct alignas(16) Vector16 {  // 16 bytes, the widest access of a thread
    uint32_t word[4];
};

#ifdef TILEWISE_EMULATOR
namespace emu {
template <class T> struct GlobalRef {
    T* p;
    using Value = std::remove_const_t<T>;
    EMU_INLINE operator Value() const {
        check_global(p, sizeof(T), Access::load);
        if (counters) count_global(p, sizeof(T));
        return *p;
    }
    EMU_INLINE const GlobalRef& operator=(const Value& x) const {
        check_store(p, &x, sizeof(T));
        if (counters) count_global(p, sizeof(T));
        *p = x;
        return *this;
    }
    EMU_INLINE const GlobalRef& operator=(const GlobalRef& x) const { return *this = Value(x); }
};
template <class T> struct SharedRef {
    uint32_t address;
    EMU_INLINE operator T() const {
        T x;
        std::memcpy(&x, shared_load(address, sizeof(T)), sizeof(T));
        if (counters) count_shared(address, sizeof(T));
        return x;
    }
    EMU_INLINE const SharedRef& operator=(const T& x) const {
        shared_store(address, &x, sizeof(T));
        if (counters) count_shared(address, sizeof(T));
        return *this;
    }
    EMU_INLINE const SharedRef& operator=(const SharedRef& x) const { return *this = T(x); }
    EMU_INLINE const SharedRef& operator+=(const T& x) const { return *this = T(*this) + x; }
    EMU_INLINE const SharedRef& operator*=(const T& x) const { return *this = T(*this) * x; }
};
}  // namespace emu
#endif

template <class T> struct Global {
    T* base;
#ifdef TILEWISE_EMULATOR
    emu::GlobalRef<T> operator[](int64_t i) const { return {base + i}; }
#else
    TILE_DEVICE T& operator[](int64_t i) const { return base[i]; }
#endif
    TILE_DEVICE Global operator+(int64_t i) const { return {base + i}; }
    TILE_DEVICE T* address(int64_t i) const { return base + i; }
    template <class U> TILE_DEVICE Global<U> as() const { return {reinterpret_cast<U*>(base)}; }
};

template <class T> struct Shared {
#ifdef TILEWISE_EMULATOR
    uint32_t offset;
    explicit Shared(uint32_t bytes) : offset(bytes) {}
    emu::SharedRef<T> operator[](int i) const { return {offset + uint32_t(i) * uint32_t(sizeof(T))}; }
    uint32_t address(int i = 0) const { return offset + uint32_t(i) * uint32_t(sizeof(T)); }
#else
    T* base;
    TILE_DEVICE explicit Shared(uint32_t bytes) : base(reinterpret_cast<T*>(ptx::shared_base() + bytes)) {}
    TILE_DEVICE T& operator[](int i) const { return base[i]; }
    TILE_DEVICE uint32_t address(int i = 0) const { return ptx::shared_address(base + i); }
#endif
};
