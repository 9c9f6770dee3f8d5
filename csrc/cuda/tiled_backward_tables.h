// Which tables the tiled backward pass takes, and what its kernels may rely on.

#pragma once

#include "tiled_backward.h"

namespace flowtt::cuda {

// The larger of the ranks that kernels are compiled for.
inline constexpr int kGradientRank = 32;

// Of a plan whose tables are described as of three cores. output_rows: of grad_output.
GradientShape find_gradient_shape(const BackwardPlan& plan, const StridedMatrix& grad_output,
                                  int64_t output_rows);

}  // namespace flowtt::cuda
