// Where the prefix products of a chain lie in a block's scratch, for the host that reserves it and
// for the kernels.

#pragma once

#include <cstdint>

namespace flowtt::cuda {

// Left operands of the products are read in vectors of 16 bytes along a row.
inline constexpr int kVectorBytes = 16;

// `elements` rounded up to whole vectors.
template <typename acc_t, typename integer_t>
constexpr integer_t whole_vectors(integer_t elements) {
  constexpr integer_t kVector = kVectorBytes / sizeof(acc_t);
  return (elements + kVector - 1) / kVector * kVector;
}

// From one row of a prefix product with `rank` columns to the next. An odd number of vectors, so
// that the same vector of eight neighbouring rows lies in different banks of shared memory.
template <typename acc_t, typename integer_t>
constexpr integer_t prefix_stride(integer_t rank) {
  constexpr integer_t kVector = kVectorBytes / sizeof(acc_t);
  const integer_t padded = whole_vectors<acc_t>(rank);
  return padded / kVector % 2 == 0 ? padded + kVector : padded;
}

// From one prefix product to the next.
template <typename acc_t, typename integer_t>
constexpr integer_t prefix_elements(integer_t rows, integer_t rank) {
  return whole_vectors<acc_t>(rows * prefix_stride<acc_t>(rank));
}

}  // namespace flowtt::cuda
