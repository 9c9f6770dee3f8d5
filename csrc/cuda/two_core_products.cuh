// The product of the two-core kernel on tensor cores, transposed: G2[i2]^T (16 columns a tile x r)
// @ G1[i1]^T (r x 8 rows). wide_shape.h has the layouts.

#pragma once

#include "tensor_core.cuh"
#include "wide_shape.h"

namespace flowtt::cuda {

// Ranks up to 32 kSteps, q2 up to 16 kTiles_.
template <int kSteps, int kTiles_, bool kThree>
struct TwoCoreProducts {
  static constexpr int kTiles = kTiles_;
  static constexpr int kParts = kThree ? 2 : 1;
  static constexpr int kGroup = kSteps == 1 ? 4 : kSteps == 2 ? 2 : 1;  // slices loaded at a time
  static constexpr int kRightRegisters = kParts * kSteps * kTiles * 8;
  static constexpr bool kLoadsRightAhead = kRightRegisters <= 32;
  static constexpr int kRegisters =
      (kLoadsRightAhead ? 2 : 1) * kRightRegisters + 2 * kParts * kSteps * kGroup * 4;
  static constexpr int kWarps = kRegisters >= 80 || kRegisters <= 48 ? 8 : 16;
  static constexpr int kBlocks = kRegisters <= 48 ? 2 : 1;  // a multiprocessor

  struct Right {
    uint32_t words[kParts][kTiles][kSteps][2][4];
  };
  struct Left {
    uint32_t words[kParts][kSteps][4];
  };

  static __device__ __forceinline__ const __half* packed(const TiledWorkspace& workspace,
                                                         int part) {
    return part == 0 ? workspace.packed_high : workspace.packed_low;
  }

  static __device__ __forceinline__ void load_right(Right& right, const TiledWorkspace& workspace,
                                                    const TwoCoreShape& shape, uint32_t offset) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const __half* slice = packed(workspace, i) + offset + lane * kVectorHalves;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if (m >= shape.right_tiles || s >= shape.steps) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            load_words(right.words[i][m][s][half],
                       slice + ((m * shape.steps + s) * 2 + half) * 32 * kVectorHalves);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void load_left(Left& left, const TiledWorkspace& workspace,
                                                   int32_t steps, uint32_t offset) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const __half* slice = packed(workspace, i) + offset + lane * kVectorHalves;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (s < steps) load_words(left.words[i][s], slice + s * 32 * kVectorHalves);
      }
    }
  }

  // The slice of core 2 in use and, where registers allow, the next one.
  struct Resident {
    Right current;
    Right ahead;
    uint32_t offset = 0xffffffffu;
    uint32_t ahead_offset = 0xffffffffu;

    // `next` is `wanted` when no other slice is known to follow.
    __device__ __forceinline__ void advance(const TiledWorkspace& workspace,
                                            const TwoCoreShape& shape, uint32_t wanted,
                                            uint32_t next) {
      if (wanted != offset) {
        if (kLoadsRightAhead && wanted == ahead_offset) {
          current = ahead;
        } else {
          load_right(current, workspace, shape, wanted);
        }
        offset = wanted;
      }
      if (kLoadsRightAhead && next != wanted && next != ahead_offset) {
        load_right(ahead, workspace, shape, next);
        ahead_offset = next;
      }
    }
  };

  static __device__ __forceinline__ void add_product(float (&row)[4], const Right& right, int m,
                                                     const Left& left, int32_t steps,
                                                     int right_part, int left_part) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s >= steps) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_add(row, right.words[right_part][m][s][half],
                     left.words[left_part][s][2 * half], left.words[left_part][s][2 * half + 1]);
      }
    }
  }

  static __device__ __forceinline__ void multiply(float (&rows)[kTiles][4], const Right& right,
                                                  const Left& left, int32_t steps) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[m][i] = 0.0f;
      if constexpr (kThree) {
        add_product(rows[m], right, m, left, steps, 0, kParts - 1);
        add_product(rows[m], right, m, left, steps, kParts - 1, 0);
      }
      add_product(rows[m], right, m, left, steps, 0, 0);
    }
  }
};

}  // namespace flowtt::cuda
