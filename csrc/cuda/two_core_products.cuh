// The product of the two-core kernel on tensor cores, transposed: G2[i2]^T (16 columns a tile x r)
// @ G1[i1]^T (r x 8 rows). wide_shape.h has the layouts.

#pragma once

#include "tensor_core.cuh"
#include "wide_shape.h"

namespace flowtt::cuda {

// For TwoCoreShape::steps = kSteps and q2 up to 16 kTiles_.
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
  static constexpr uint32_t kTileBytes = kSteps * 32 * 16;  // of core 1, 8 rows

  struct Right {
    uint32_t words[kParts][kTiles][kSteps][2][4];
  };
  struct Left {
    uint32_t words[kParts][kSteps][4];
  };

  // Where the lane's vectors of the packed cores start.
  struct Packed {
    const char* parts[kParts];

    __device__ __forceinline__ explicit Packed(const TiledWorkspace& workspace) {
      const uint32_t lane = threadIdx.x % 32;
      parts[0] = reinterpret_cast<const char*>(workspace.packed_high) + lane * 16;
      if constexpr (kThree) {
        parts[1] = reinterpret_cast<const char*>(workspace.packed_low) + lane * 16;
      }
    }
  };

  static __device__ __forceinline__ void load(uint32_t (&words)[4], const char* source) {
    load_words(words, reinterpret_cast<const __half*>(source));
  }

  // `offset` of a slice, in bytes.
  static __device__ __forceinline__ void load_right(Right& right, const Packed& packed,
                                                    uint32_t offset) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const char* const slice = packed.parts[i] + offset;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            load(right.words[i][m][s][half], slice + ((m * kSteps + s) * 2 + half) * 32 * 16);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void load_left(Left& left, const Packed& packed,
                                                   uint32_t offset) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const char* const slice = packed.parts[i] + offset;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) load(left.words[i][s], slice + s * 32 * 16);
    }
  }

  // The slice of core 2 in use and, where registers allow, the next one.
  struct Resident {
    Right current;
    Right ahead;
    uint32_t offset = 0xffffffffu;
    uint32_t ahead_offset = 0xffffffffu;

    __device__ __forceinline__ void use(const Packed& packed, uint32_t wanted) {
      if (wanted == offset) return;
      offset = wanted;
      if (kLoadsRightAhead && wanted == ahead_offset) {
        current = ahead;
      } else {
        load_right(current, packed, wanted);
      }
    }
    __device__ __forceinline__ void prepare(const Packed& packed, uint32_t next) {
      if (!kLoadsRightAhead || next == ahead_offset || next == offset) return;
      ahead_offset = next;
      load_right(ahead, packed, next);
    }
  };

  static __device__ __forceinline__ void add_product(float (&row)[4], const Right& right, int m,
                                                     const Left& left, int right_part,
                                                     int left_part) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_add(row, right.words[right_part][m][s][half], left.words[left_part][s][2 * half],
                     left.words[left_part][s][2 * half + 1]);
      }
    }
  }

  static __device__ __forceinline__ void multiply(float (&rows)[kTiles][4], const Right& right,
                                                  const Left& left) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[m][i] = 0.0f;
      if constexpr (kThree) {
        add_product(rows[m], right, m, left, 0, kParts - 1);
        add_product(rows[m], right, m, left, kParts - 1, 0);
      }
      add_product(rows[m], right, m, left, 0, 0);
    }
  }
};

}  // namespace flowtt::cuda
