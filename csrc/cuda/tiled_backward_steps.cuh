// Tables with larger ranks and q in the backward pass: how a tile is narrowed down to a block of
// its table (tiled_backward_block.cuh), and the steps of r1.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::enter_block(
    const TiledFeature& feature) {
  const GradientBlocks blocks(feature.q, feature.r, kRank);
  const GradientBlock block(blocks, slot_.block, kRank);
  steps_ = blocks.steps;
  if constexpr (!kExact) {
    q1_ = min(whole_.q1 - block.first_q1, static_cast<uint32_t>(kGradientQ));
    q2_ = min(whole_.q2 - block.first_q2, static_cast<uint32_t>(kGradientQ));
    q3_ = min(whole_.q3 - block.first_q3, static_cast<uint32_t>(kGradientColumns));
    r1_ = min(whole_.r1, static_cast<uint32_t>(kRank));
    r2_ = min(whole_.r2 - block.first_r2, static_cast<uint32_t>(kRank));
  }
  offsets_[0] = block.first_q1 * first_row();
  offsets_[1] = block.first_q2 * second_columns() + block.first_r2;
  if constexpr (kTwoCores) offsets_[0] = block.first_q1 * second_row() + offsets_[1];
  offsets_[2] = block.first_r2 * third_row() + block.first_q3;
  first_ += offsets_[0];
  if constexpr (!kTwoCores) second_ += offsets_[1];
  third_ += offsets_[2];
  column_ += (block.first_q1 * whole_.q2 + block.first_q2) * whole_.q3 + block.first_q3;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::enter_step(
    uint32_t step) {
  const uint32_t from = step_ * kRank;
  const uint32_t to = step * kRank;
  const uint32_t second_from = from * second_row();
  const uint32_t second_to = to * second_row();
  first_ += static_cast<int64_t>(to) - from;
  second_ += static_cast<int64_t>(second_to) - second_from;
  offsets_[0] += to - from;
  offsets_[1] += second_to - second_from;
  if constexpr (!kExact) r1_ = min(whole_.r1 - to, static_cast<uint32_t>(kRank));
  step_ = step;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::compute_product_steps() {
  if constexpr (!kWhole) {
#pragma unroll 1
    for (uint32_t step = 1; step < steps_; ++step) {
      enter_step(step);
      OwnSecond second;
      load_second(second);
      const FirstRows first = load_first();
      __syncthreads();  // the last step's G2 has been read
      store_second(second);
      __syncthreads();
      compute_products(first);
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_gradient_steps() {
  if constexpr (!kWhole) {
#pragma unroll 1
    for (uint32_t step = steps_ - 1; step > 0; --step) {
      add_first_gradients();
      __syncthreads();  // dP of all entries is there
      add_second_gradient(sum_second_gradient());
      enter_step(step - 1);
      OwnSecond second;
      load_second(second);
      const FirstRows first = load_first();
      __syncthreads();  // this step's operands have been read
      store_second(second);
      store_first(first);
      __syncthreads();
    }
  }
}

}  // namespace flowtt::cuda
