// The rows of grad_output that a warp of the backward pass needs next, on their way to a ring in
// shared memory. No register holds them meanwhile, so that several can be on their way.

#pragma once

#include "float_types.cuh"
#include "matrix_memory.cuh"
#include "tiled_backward.h"
#include "tiled_backward_tile.cuh"

namespace flowtt::cuda {

// Rows of a ring.
inline constexpr uint32_t kRingRows = 4;

struct GradientRing {
  float rows[kRingRows][kGradientQ * kGradientQ * kGradientColumns];
};

// The elements of a row, [(j1, j2), j3], that a lane needs as operands of products.
struct RowGradient {
  float b[4];  // rows (j1, j2) = (i, t), column g
  float4 a;    // rows (j1, j2) = g and g + 8 at column 2 t, then the same at 2 t + 1
};

// A warp's ring, for rows of one feature. Called by whole warps.
template <GradientShape kShape, int kRank>
class GradientRows {
  static constexpr bool kExact = kShape == GradientShape::kExact;
  static constexpr uint32_t kExactColumns = kRank / kGradientQ;
  static constexpr uint32_t kRowBytes = sizeof(GradientRing) / kRingRows;

 public:
  // column: of the feature's first element in `grad`.
  __device__ __forceinline__ GradientRows(GradientRing& ring, const StridedMatrix& grad,
                                          int64_t column, uint32_t q1, uint32_t q2, uint32_t q3)
      : grad_(grad),
        column_(column),
        q1_(kExact ? kGradientQ : q1),
        q2_(kExact ? kGradientQ : q2),
        q3_(kExact ? kExactColumns : q3),
        lane_(threadIdx.x % 32),
        ring_(ring) {}

  // What stands for a row in `fetch`: kExact, vectors of four floats from the first row to it.
  __device__ __forceinline__ uint32_t name(uint32_t row) const {
    return kExact ? row * static_cast<uint32_t>(grad_.row_stride / 4) : row;
  }

  // To be called before anything is fetched or read.
  __device__ __forceinline__ void start() {
    if constexpr (kExact) {
      const float* const first = static_cast<const float*>(grad_.data) + column_ + 4 * lane_;
      source_ = reinterpret_cast<const float4*>(hold(reinterpret_cast<uint64_t>(first)));
    }
    target_ = hold(shared_address(&ring_) + lane_ * (kExact ? 16u : 0u));
    const uint32_t g = lane_ / 4;
    const uint32_t t = lane_ % 4;
    if constexpr (kExact) {
      b_ = hold((t * kExactColumns + g) * static_cast<uint32_t>(sizeof(float)));
      a_ = hold((g * kExactColumns + 2 * t) * static_cast<uint32_t>(sizeof(float)));
    }
    place_ = hold(0u);
  }

  // Starts to fetch a row, if there is one, into the place that was read last; the first kRingRows
  // go to one place after the other, see next.
  __device__ __forceinline__ void fetch(uint32_t row, bool exists) {
    store_pending();
    if (exists) copy(row);
    close_copies();
  }

  // Goes on to the next place.
  __device__ __forceinline__ void next() { place_ = (place_ + kRowBytes) % sizeof(GradientRing); }

  // The row at this place, when the kRingRows - 1 after it have been asked for.
  __device__ __forceinline__ RowGradient read() const {
    wait_for_older_copies<kRingRows - 1>();
    __syncwarp();
    const float* const row = ring_.rows[0];
    RowGradient gradient;
    if constexpr (kExact) {
      constexpr uint32_t kRowOfJ1 = kGradientQ * kExactColumns * sizeof(float);
      constexpr bool kFull = kExactColumns == kGradientColumns;
      gradient = {};
      if (kFull || lane_ / 4 < kExactColumns) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          gradient.b[i] = load_at<float>(row, place_ + b_ + i * kRowOfJ1);
        }
      }
      if (kFull || lane_ % 4 < kExactColumns / 2) {
        const float2 upper = load_at<float2>(row, place_ + a_);
        const float2 lower = load_at<float2>(row, place_ + a_ + 2 * kRowOfJ1);
        gradient.a = make_float4(upper.x, lower.x, upper.y, lower.y);
      }
    } else {
      const uint32_t g = lane_ / 4;
      const uint32_t t = lane_ % 4;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) gradient.b[i] = element(i, t, g);
      const uint32_t j1 = g / 4;
      const uint32_t j2 = g % 4;
      gradient.a = make_float4(element(j1, j2, 2 * t), element(j1 + 2, j2, 2 * t),
                               element(j1, j2, 2 * t + 1), element(j1 + 2, j2, 2 * t + 1));
    }
    __syncwarp();
    return gradient;
  }

 private:
  __device__ __forceinline__ float element(uint32_t j1, uint32_t j2, uint32_t j3) const {
    if (j1 >= q1_ || j2 >= q2_ || j3 >= q3_) return 0.0f;
    return load_at<float>(ring_.rows[0],
                          place_ + ((j1 * q2_ + j2) * q3_ + j3) * static_cast<uint32_t>(4));
  }

  __device__ __forceinline__ void copy(uint32_t row) {
    const uint32_t columns = q1_ * q2_ * q3_;
    const uint32_t target = target_ + place_;
    if constexpr (kExact) {
      if (kExactColumns == kGradientColumns || lane_ < kGradientQ * kExactColumns) {
        copy_async(target, source_ + row);
      }
    } else if constexpr (kShape == GradientShape::kEven) {
      const float* const source =
          static_cast<const float*>(grad_.data) + row * grad_.row_stride + column_;
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t column = 64 * i + 2 * lane_;
        if (column < columns) copy_async_8(target + 4 * column, source + column);
      }
    } else {
      const int64_t first = row * grad_.row_stride + column_ * grad_.column_stride;
      const bool is_fp32 = grad_.type == ElementType::kFloat32;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t column = 32 * i + lane_;
        if (column >= columns) continue;
        const int64_t offset = first + column * grad_.column_stride;
        if (is_fp32) {
          copy_async_4(target + 4 * column, static_cast<const float*>(grad_.data) + offset);
        } else {
          pending_[i] = load_element<float>(grad_.data, grad_.type, offset);
        }
      }
      pending_place_ = is_fp32 ? kNoPlace : place_;
    }
  }

  // Rows of 16-bit elements pass through registers: they are stored when the next is fetched.
  __device__ __forceinline__ void store_pending() {
    if constexpr (kShape == GradientShape::kAny) {
      if (pending_place_ == kNoPlace) return;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t column = 32 * i + lane_;
        if (column < q1_ * q2_ * q3_) {
          store_at(ring_.rows[0], pending_place_ + 4 * column, pending_[i]);
        }
      }
      pending_place_ = kNoPlace;
    }
  }

  static constexpr uint32_t kNoPlace = ~0u;

  const StridedMatrix& grad_;
  const int64_t column_;
  const uint32_t q1_;
  const uint32_t q2_;
  const uint32_t q3_;
  const uint32_t lane_;
  GradientRing& ring_;
  // Of the lane, computed once.
  const float4* source_;
  uint32_t target_;
  uint32_t b_;
  uint32_t a_;
  uint32_t place_;  // of a row in the ring, in bytes
  float pending_[4];
  uint32_t pending_place_ = kNoPlace;
};

}  // namespace flowtt::cuda
