// A map of the ids that a range looks up: two bits for each id of each feature. It does for batches
// that are not too small for their tables what sorting and folding do for others, and better: its
// order is that of the ids, no id comes twice, and a lookup finds its row by counting bits.
//
//     clear ──► mark: which ids there are, ──► rank: how many come before ──► find: the row of each
//               and which more than once       the ids of each part           lookup

#pragma once

#include "tiled_digits.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// Neighbouring ids lie in a part of 32 bytes, which is read at once: seven words with the bits of
// 16 ids each, then the ranks of the part's first row, see PartRanks.
inline constexpr uint32_t kIdsPerWord = 16;
inline constexpr uint32_t kMapWords = 7;
inline constexpr uint32_t kPartWords = kMapWords + 1;
inline constexpr uint32_t kIdsPerPart = kMapWords * kIdsPerWord;

// Parts that a block ranks, one a thread. No two features have parts of one tile.
inline constexpr int32_t kRankThreads = 256;
inline constexpr int32_t kPartsPerTile = kRankThreads;

// Lookups of a block that marks ids, or finds rows: kMinChunkShift to this, as in TiledRange.
inline constexpr int kMaxMapChunkShift = 10;

// Of an id, the lower bit of its pair: it is looked up; and the upper one: more than once.
inline constexpr uint32_t kSeenBits = 0x55555555u;
inline constexpr uint32_t kSharedBits = ~kSeenBits;

// Rows of a tile before a part: all | those that lookups share << 16.
static_assert(kPartsPerTile * kIdsPerPart < 1 << 16);

// Of a tile, from which numbers on its rows are counted.
struct __align__(16) TileRanks {
  uint32_t row;     // of the feature
  uint32_t shared;  // of the rows that lookups share
  uint32_t single;  // of the others
  uint32_t unused;
};

// Where an id's bits are.
struct MapPlace {
  uint32_t part;
  uint32_t word;   // of the part
  uint32_t shift;  // of the pair, in the word

  __device__ __forceinline__ uint32_t seen() const { return 1u << shift; }
};

// Ids come in the order of (i2, i1, i3), as in which neighbours have most in common.
__device__ __forceinline__ MapPlace find_map_place(const TiledFeature& feature,
                                                   const LookupDigits& digits) {
  const uint32_t number =
      (digits.i2 * static_cast<uint32_t>(feature.p[0]) + (digits.outer & 0xffffu)) *
          static_cast<uint32_t>(feature.p[2]) +
      (digits.outer >> 16);
  const uint32_t part = number / kIdsPerPart;
  const uint32_t id = number - part * kIdsPerPart;
  return {feature.first_part + part, id / kIdsPerWord, id % kIdsPerWord * 2};
}

// A part in registers.
struct MapPart {
  uint32_t words[kPartWords];

  __device__ __forceinline__ MapPart(const uint4* map, uint32_t part) {
    const uint4 low = __ldcg(map + 2 * static_cast<uint64_t>(part));
    const uint4 high = __ldcg(map + 2 * static_cast<uint64_t>(part) + 1);
    const uint32_t loaded[kPartWords] = {low.x,  low.y,  low.z,  low.w,
                                         high.x, high.y, high.z, high.w};
#pragma unroll
    for (uint32_t i = 0; i < kPartWords; ++i) words[i] = loaded[i];
  }

  // The ids that are looked up | those of more than one lookup << 16, of the ids whose bits
  // mask(word) has. Pairs of words are counted together: each has only every other bit.
  template <typename Mask>
  __device__ __forceinline__ uint32_t count(Mask&& mask) const {
    uint32_t seen = 0;
    uint32_t shared = 0;
#pragma unroll
    for (uint32_t i = 0; i < kMapWords; i += 2) {
      const uint32_t first = words[i] & mask(i);
      const uint32_t second = i + 1 < kMapWords ? words[i + 1] & mask(i + 1) : 0;
      seen += __popc((first & kSeenBits) | (second & kSeenBits) << 1);
      shared += __popc((first & kSharedBits) | (second & kSharedBits) >> 1);
    }
    return seen | shared << 16;
  }
};

}  // namespace flowtt::cuda
