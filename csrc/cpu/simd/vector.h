// Vectors of a fixed number of lanes, by the compiler's vector extension: one source serves every
// instruction set. Everything in simd/ lives in an unnamed namespace, because the files are
// compiled several times with different instruction sets and must share no symbol.
#pragma once

#include <cstdint>

namespace flowtt {
namespace {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kVectorRegisters = 32;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kVectorRegisters = 16;
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kVectorRegisters = 16;
#endif

template <typename A>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

template <typename A, int W>
struct VectorOf {
  typedef A type __attribute__((vector_size(W * sizeof(A))));
};
template <typename A>
struct VectorOf<A, 1> {
  using type = A;
};
template <typename A, int W>
using Vector = typename VectorOf<A, W>::type;

#define FLOWTT_INLINE __attribute__((always_inline)) inline

template <typename A, int W>
FLOWTT_INLINE Vector<A, W> load(const A* source) {
  Vector<A, W> value;
  __builtin_memcpy(&value, source, sizeof(value));
  return value;
}

template <typename A, int W>
FLOWTT_INLINE void store(A* target, const Vector<A, W>& value) {
  __builtin_memcpy(target, &value, sizeof(value));
}

// Calls body.template operator()<W>(i) for i = 0, W, 2W, .. with vectors as wide as still fit, down
// to single elements: covers exactly [0, count).
template <typename A, int W = kLanes<A>, typename Body>
FLOWTT_INLINE void for_each_vector(int64_t count, const Body& body, int64_t begin = 0) {
  int64_t i = begin;
  for (; i + W <= count; i += W) {
    body.template operator()<W>(i);
  }
  if constexpr (W > 1) {
    if (i < count) {
      for_each_vector<A, (W > 4 ? W / 2 : 1)>(count, body, i);
    }
  }
}

template <typename A>
FLOWTT_INLINE void add_to(A* target, const A* source, int64_t count) {
  for_each_vector<A>(count, [&]<int W>(int64_t i) {
    store<A, W>(target + i, load<A, W>(target + i) + load<A, W>(source + i));
  });
}

template <typename A>
FLOWTT_INLINE void set_zero(A* target, int64_t count) {
  __builtin_memset(target, 0, static_cast<unsigned long>(count) * sizeof(A));
}

}  // namespace
}  // namespace flowtt
