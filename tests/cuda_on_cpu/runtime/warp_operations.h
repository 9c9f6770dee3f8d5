// Operations of the 32 lanes of a warp.

#pragma once

#include <cstring>

#include "grid.h"

namespace cuda_on_cpu {

template <typename T>
T value_of(const Exchange& values, int lane) {
  T value;
  std::memcpy(&value, values.slots[lane], sizeof(T));
  return value;
}

template <typename T>
T shuffle(unsigned mask, const T& value, int lane) {
  return value_of<T>(exchange(Operation::kShuffle, mask, &value, sizeof(T)), lane);
}

template <typename T, typename Combine>
T reduce(unsigned mask, T value, Combine combine) {
  const Exchange& values = exchange(Operation::kReduce, mask, &value, sizeof(T));
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lane == current->lane || (values.present >> lane & 1) == 0) continue;
    value = combine(value, value_of<T>(values, lane));
  }
  return value;
}

}  // namespace cuda_on_cpu

inline void __syncwarp(unsigned mask = cuda_on_cpu::kWholeWarp) {
  cuda_on_cpu::exchange(cuda_on_cpu::Operation::kBarrier, mask, nullptr, 0);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = cuda_on_cpu::kLanes) {
  const int first = cuda_on_cpu::current->lane & ~(width - 1);
  return cuda_on_cpu::shuffle(mask, value, first | (lane & (width - 1)));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  const int lane = cuda_on_cpu::current->lane;
  return cuda_on_cpu::shuffle(mask, value, lane >= distance ? lane - distance : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int distance) {
  const int lane = cuda_on_cpu::current->lane;
  const int other = lane + distance;
  return cuda_on_cpu::shuffle(mask, value, other < cuda_on_cpu::kLanes ? other : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return cuda_on_cpu::shuffle(mask, value, cuda_on_cpu::current->lane ^ bits);
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const cuda_on_cpu::Exchange& votes =
      cuda_on_cpu::exchange(cuda_on_cpu::Operation::kVote, mask, &vote, sizeof(vote));
  unsigned ballot = 0;
  for (int lane = 0; lane < cuda_on_cpu::kLanes; ++lane) {
    ballot |= static_cast<unsigned>(cuda_on_cpu::value_of<uint8_t>(votes, lane) != 0) << lane;
  }
  return ballot & votes.present;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return !__any_sync(mask, !vote); }

template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const cuda_on_cpu::Exchange& values =
      cuda_on_cpu::exchange(cuda_on_cpu::Operation::kMatch, mask, &value, sizeof(value));
  unsigned equal = 0;
  for (int lane = 0; lane < cuda_on_cpu::kLanes; ++lane) {
    equal |= static_cast<unsigned>(cuda_on_cpu::value_of<T>(values, lane) == value) << lane;
  }
  return equal & values.present;
}

template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return cuda_on_cpu::reduce(mask, value, [](T left, T right) { return left + right; });
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return cuda_on_cpu::reduce(mask, value,
                             [](T left, T right) { return right < left ? right : left; });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return cuda_on_cpu::reduce(mask, value,
                             [](T left, T right) { return left < right ? right : left; });
}
