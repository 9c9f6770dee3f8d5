// The second step of sorting: the lookups of a granule, an equal part of a feature's lookups in the
// order of their buckets, from the places in the chunks where the partition has left them.
//
// The chunks' bucket starts say all. Added up over the chunks they are where each bucket starts
// among all lookups of the feature; in the order of buckets, and within a bucket of chunks, they
// cut the lookups into segments that lie together. Places are exact: nothing can overflow, however
// ids are distributed.

#pragma once

#include "tiled_chunks.cuh"

namespace flowtt::cuda {

// Lookups [begin, begin + count) of feature f of the group, in the order of buckets.
struct Granule {
  int32_t f;
  int32_t begin;
  int32_t count;  // 0: the block has none
  int32_t lookups;
  int32_t first_entry;
  int32_t first_chunk;
  int32_t chunks;
};

// In shared memory. A lookup a thread: code that runs once is read from far away, so that more of
// it for several lookups a thread costs more than more threads do.
template <int kBlockThreads>
struct GatherScratch {
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32 && kBuckets <= kThreads);

  // Where each bucket starts, at place_of(bucket).
  uint32_t starts[kBuckets];
  uint32_t first_bucket;
  uint32_t last_bucket;
  uint32_t warp_sums[2][kWarps];  // of segments, used in turn
  // At the granule's first lookup of a segment: a bit, and how far ahead of its place in the
  // granule the lookup lies among those that are partitioned.
  uint32_t segment_bits[kWarps];
  int32_t distances[kThreads];
  Segments segments;
  Granule granule;

  // Lanes that have eight neighbouring buckets each meet in no bank.
  static __device__ __forceinline__ int place_of(int bucket) {
    return bucket % 8 * (kBuckets / 8) + bucket / 8;
  }
};

// Finds granule `number`; feature after feature, of each as many as it needs, of equal length.
// most: lookups of a granule, at most kThreads. By the first warp, after load_segments.
template <typename Scratch>
__device__ __forceinline__ void find_granule(Scratch& scratch, int32_t features,
                                             int32_t chunk_shift, int32_t most, int32_t number) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  const int32_t first = scratch.segments.first_entry[min(lane, features - 1)];
  const int32_t lookups = lane < features ? scratch.segments.first_entry[lane + 1] - first : 0;
  const int32_t granules = (lookups + most - 1) / most;
  const int32_t up_to = inclusive_sum(granules);
  const int32_t chunks = count_chunks(lookups, chunk_shift);
  const int32_t chunks_up_to = inclusive_sum(chunks);
  const int32_t f = __ffs(__ballot_sync(kAllLanes, up_to > number)) - 1;
  if (lane == max(f, 0)) {
    const int32_t per_granule = granules > 0 ? (lookups + granules - 1) / granules : 0;
    const int32_t begin = min((number - (up_to - granules)) * per_granule, lookups);
    scratch.granule = {f,       begin, f < 0 ? 0 : min(per_granule, lookups - begin),
                       lookups, first, chunks_up_to - chunks,
                       chunks};
  }
}

// Adds up where each bucket starts in each chunk, and finds the granule's first and last bucket.
// Called by all threads, with zeros in starts; ends with a barrier.
template <typename Scratch>
__device__ __forceinline__ void find_buckets(Scratch& scratch, const uint16_t* rows) {
  static_assert(kBuckets == 8 * 32);
  constexpr int kRowVectors = kBucketRow / 8;
  // Chunks of a warp that are loaded at once; sums of their starts fit into 16 bits.
  constexpr int kAhead = 4;
  static_assert(kAhead * kMaxChunk < 1 << 16);
  const Granule& granule = scratch.granule;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint4* const row = reinterpret_cast<const uint4*>(rows) + lane;
#pragma unroll 1
  for (int32_t base = threadIdx.x / 32; base < granule.chunks; base += kAhead * Scratch::kWarps) {
    uint4 starts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int32_t chunk = base + i * Scratch::kWarps;
      starts[i] = make_uint4(0, 0, 0, 0);
      if (chunk < granule.chunks) starts[i] = row[chunk * kRowVectors];
    }
    uint32_t pairs[4] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      pairs[0] += starts[i].x;
      pairs[1] += starts[i].y;
      pairs[2] += starts[i].z;
      pairs[3] += starts[i].w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      atomicAdd(&scratch.starts[scratch.place_of(8 * lane + 2 * i)], pairs[i] & 0xffffu);
      atomicAdd(&scratch.starts[scratch.place_of(8 * lane + 2 * i + 1)], pairs[i] >> 16);
    }
  }
  __syncthreads();
  const int bucket = static_cast<int>(threadIdx.x);
  if (bucket < kBuckets) {
    const uint32_t start = scratch.starts[scratch.place_of(bucket)];
    const uint32_t end = bucket + 1 < kBuckets ? scratch.starts[scratch.place_of(bucket + 1)]
                                               : static_cast<uint32_t>(granule.lookups);
    const uint32_t first = granule.begin;
    const uint32_t last = granule.begin + granule.count - 1;
    if (start <= first && first < end) scratch.first_bucket = bucket;
    if (start <= last && last < end) scratch.last_bucket = bucket;
  }
  __syncthreads();
}

// Finds the segments of the granule. As find_buckets, with zeros in segment_bits.
template <typename Scratch>
__device__ __forceinline__ void find_segments(Scratch& scratch, const uint16_t* rows,
                                              int32_t chunk_shift) {
  const Granule granule = scratch.granule;
  const int32_t first_bucket = static_cast<int32_t>(scratch.first_bucket);
  const int32_t segments =
      (static_cast<int32_t>(scratch.last_bucket) - first_bucket + 1) * granule.chunks;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  // Where the segments of this round start, relative to the granule.
  int32_t start =
      static_cast<int32_t>(scratch.starts[scratch.place_of(first_bucket)]) - granule.begin;
  int round = 0;
#pragma unroll 1
  for (int32_t base = 0; base < segments && start < granule.count;
       base += Scratch::kThreads, round ^= 1) {
    const uint32_t segment = base + threadIdx.x;
    const uint32_t bucket = segment / static_cast<uint32_t>(granule.chunks);
    const int32_t chunk = static_cast<int32_t>(segment - bucket * granule.chunks);
    int32_t from = 0;
    int32_t count = 0;
    if (static_cast<int32_t>(segment) < segments) {
      const uint16_t* const starts = rows + chunk * kBucketRow + first_bucket + bucket;
      from = starts[0];
      count = starts[1] - from;
    }
    const int32_t up_to = inclusive_sum(count);
    if (lane == 31) scratch.warp_sums[round][warp] = up_to;
    __syncthreads();
    const int32_t of_warp =
        lane < Scratch::kWarps ? static_cast<int32_t>(scratch.warp_sums[round][lane]) : 0;
    const int32_t place =
        start + up_to - count + __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
    const int32_t visible = max(place, 0);
    if (visible < min(place + count, granule.count)) {
      atomicOr(&scratch.segment_bits[visible / 32], 1u << visible % 32);
      scratch.distances[visible] = (chunk << chunk_shift) + from - place;
    }
    start += __reduce_add_sync(kAllLanes, of_warp);
  }
  __syncthreads();
}

// Where the lookup of this thread lies among those that are partitioned, after find_segments. By
// whole warps; threads beyond the granule get the place of its last lookup.
template <typename Scratch>
__device__ __forceinline__ int32_t find_partitioned(const Scratch& scratch) {
  const Granule& granule = scratch.granule;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t bits = lane < Scratch::kWarps ? scratch.segment_bits[lane] : 0;
  const uint32_t words = __ballot_sync(kAllLanes, bits != 0);
  const int item = min(static_cast<int>(threadIdx.x), granule.count - 1);
  const uint32_t up_to =
      __shfl_sync(kAllLanes, bits, item / 32) & (0xffffffffu >> (31 - item % 32));
  const int word_before = 31 - __clz(words & ((1u << item / 32) - 1));
  const uint32_t bits_before = __shfl_sync(kAllLanes, bits, max(word_before, 0));
  const int start =
      up_to != 0 ? (item & ~31) + 31 - __clz(up_to) : word_before * 32 + 31 - __clz(bits_before);
  return granule.first_entry + item + scratch.distances[max(start, 0)];
}

// From the start of a block to the place of each thread's lookup, of granule `number`: false if
// there are none. Waits for the partition. Called by all threads; has barriers.
template <typename Scratch>
__device__ __forceinline__ bool find_lookups(Scratch& scratch, const TiledGroup& group,
                                             const BagBatch& batch, const TiledRange& range,
                                             const TiledWorkspace& workspace, int32_t number,
                                             int32_t* place, int32_t most = Scratch::kThreads) {
  if (threadIdx.x < kBuckets) scratch.starts[threadIdx.x] = 0;
  if (threadIdx.x < Scratch::kWarps) scratch.segment_bits[threadIdx.x] = 0;
  load_segments(scratch.segments, group, batch, range);
  if (threadIdx.x < 32) find_granule(scratch, group.count, range.chunk_shift, most, number);
  __syncthreads();
  wait_for_previous_kernel();
  // Offsets out of order can make features overlap; the preparation reports them.
  if (scratch.segments.first_entry[group.count] > range.end_lookup - range.first_lookup ||
      scratch.granule.count == 0) {
    return false;
  }
  const uint16_t* const rows =
      workspace.bucket_starts + static_cast<int64_t>(scratch.granule.first_chunk) * kBucketRow;
  find_buckets(scratch, rows);
  find_segments(scratch, rows, range.chunk_shift);
  *place = find_partitioned(scratch);
  return true;
}

}  // namespace flowtt::cuda
