// What an optimizer does to elements of a core: SGD, Adagrad, row-wise Adagrad and Adam as FBGEMM's
// table-batched embeddings have them.

#pragma once

#include "kernel_params.h"
#include "stochastic_rounding.cuh"

namespace flowtt::cuda {

// Constants of a step, the same for all elements.
template <typename acc_t>
struct StepConstants {
  acc_t learning_rate;
  acc_t eps;
  acc_t beta1;
  acc_t beta2;
  acc_t one_minus_beta1;  // not of the rounded betas, of which too little would be left
  acc_t one_minus_beta2;
  acc_t weight_decay;
  acc_t bias_correction1;  // 1 - beta1^iter
  acc_t bias_correction2;  // 1 - beta2^iter
  // Of the step and the core: what elements are rounded by, with stochastic rounding.
  uint64_t seed;
};

// log_beta1, log_beta2: natural logarithms of Adam's decays. core: its number in the call.
template <OptimizerType kType, typename acc_t>
__device__ __forceinline__ StepConstants<acc_t> load_step_constants(
    const OptimizerArguments& params, acc_t log_beta1, acc_t log_beta2, int32_t core) {
  const int64_t iteration = *params.iteration;
  StepConstants<acc_t> step{acc_t(*params.learning_rate),
                            acc_t(params.eps),
                            acc_t(params.beta1),
                            acc_t(params.beta2),
                            acc_t(1 - params.beta1),
                            acc_t(1 - params.beta2),
                            acc_t(params.weight_decay),
                            acc_t(1),
                            acc_t(1),
                            rounding_seed(iteration, core)};
  if constexpr (kType == OptimizerType::kAdam) {
    step.bias_correction1 = -expm1(acc_t(iteration) * log_beta1);
    step.bias_correction2 = -expm1(acc_t(iteration) * log_beta2);
  }
  return step;
}

// What an optimizer subtracts from one element, whose state it updates. step_size: of row-wise
// Adagrad.
template <OptimizerType kType, typename acc_t>
__device__ __forceinline__ acc_t element_delta(const StepConstants<acc_t>& step, acc_t step_size,
                                               acc_t value, acc_t gradient, acc_t& momentum1,
                                               acc_t& momentum2) {
  if constexpr (kType == OptimizerType::kAdagrad) {
    momentum1 += gradient * gradient;
    return step.learning_rate * gradient / (sqrt(momentum1) + step.eps);
  } else if constexpr (kType == OptimizerType::kRowWiseAdagrad) {
    return step_size * gradient;
  } else if constexpr (kType == OptimizerType::kAdam) {
    momentum1 = step.beta1 * momentum1 + step.one_minus_beta1 * gradient;
    momentum2 = step.beta2 * momentum2 + step.one_minus_beta2 * gradient * gradient;
    const acc_t direction =
        (momentum1 / step.bias_correction1) / (sqrt(momentum2 / step.bias_correction2) + step.eps);
    return step.learning_rate * (direction + step.weight_decay * value);
  } else {
    return step.learning_rate * gradient;
  }
}

// Neighbours in memory, moved at once.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Neighbours {
  T elements[kCount];

  static __device__ __forceinline__ Neighbours& at(T* data, uint32_t first) {
    return *reinterpret_cast<Neighbours*>(data + first);
  }
};

// Neighbouring elements of a core, with their gradients and states.
template <typename core_t>
struct SteppedCore {
  using acc_t = accumulator_t<core_t>;
  core_t* values;
  acc_t* gradients;
  acc_t* momentum1;
  acc_t* momentum2;
  int64_t first;  // number of the first element in the core

  __device__ __forceinline__ SteppedCore(const CoreTask& task, int64_t first)
      : values(static_cast<core_t*>(task.values) + first),
        gradients(static_cast<acc_t*>(const_cast<void*>(task.gradient)) + first),
        momentum1(static_cast<acc_t*>(task.momentum1) + first),
        momentum2(static_cast<acc_t*>(task.momentum2) + first),
        first(first) {}
};

// kCount of them on their way through a step.
template <typename core_t, OptimizerType kType, int kCount>
struct SteppedElements {
  using acc_t = accumulator_t<core_t>;
  using State = Neighbours<acc_t, kCount>;
  static constexpr bool kHasMomentum2 = kType == OptimizerType::kAdam;
  static constexpr bool kHasMomentum1 = kType == OptimizerType::kAdagrad || kHasMomentum2;

  Neighbours<core_t, kCount> values;
  State gradients;
  State momentum1;
  State momentum2;

  __device__ __forceinline__ void load(const SteppedCore<core_t>& core, uint32_t at) {
    values = Neighbours<core_t, kCount>::at(core.values, at);
    gradients = State::at(core.gradients, at);
    if constexpr (kHasMomentum1) momentum1 = State::at(core.momentum1, at);
    if constexpr (kHasMomentum2) momentum2 = State::at(core.momentum2, at);
  }

  __device__ __forceinline__ void step_and_store(const SteppedCore<core_t>& core,
                                                 const OptimizerArguments& params,
                                                 const StepConstants<acc_t>& step, acc_t step_size,
                                                 uint32_t at) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const acc_t value = to_accumulator<acc_t>(values.elements[i]);
      const acc_t stepped =
          value - element_delta<kType>(step, step_size, value, gradients.elements[i],
                                       momentum1.elements[i], momentum2.elements[i]);
      if constexpr (sizeof(core_t) == 2) {
        if (params.stochastic_rounding) {
          values.elements[i] =
              round_stochastically<core_t>(stepped, random_bits(step.seed, core.first + at + i));
          continue;
        }
      }
      values.elements[i] = from_accumulator<core_t>(stepped);
    }
    Neighbours<core_t, kCount>::at(core.values, at) = values;
    if constexpr (kHasMomentum1) State::at(core.momentum1, at) = momentum1;
    if constexpr (kHasMomentum2) State::at(core.momentum2, at) = momentum2;
  }
};

}  // namespace flowtt::cuda
