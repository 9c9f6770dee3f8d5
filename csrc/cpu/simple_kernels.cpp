// Plain reference kernels: every lookup on its own, no sharing, one thread.
#include <cmath>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <type_traits>

#include "cpu/embedding_bag_cpu.h"

namespace flowtt {
namespace {

double half_to_double(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const double mantissa = bits & 1023;
  double value = exponent == 0    ? std::ldexp(mantissa, -24)
                 : exponent == 31 ? (mantissa != 0 ? NAN : INFINITY)
                                  : std::ldexp(mantissa + 1024, exponent - 25);
  return bits >> 15 ? -value : value;
}

double load(const void* data, ElementType type, int64_t i) {
  switch (type) {
    case ElementType::kFloat32: return static_cast<const float*>(data)[i];
    case ElementType::kFloat64: return static_cast<const double*>(data)[i];
    case ElementType::kFloat16: return half_to_double(static_cast<const uint16_t*>(data)[i]);
    case ElementType::kBFloat16: {
      const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    }
  }
  return 0;
}

void store(void* data, ElementType type, int64_t i, double value) {
  switch (type) {
    case ElementType::kFloat32: static_cast<float*>(data)[i] = static_cast<float>(value); return;
    case ElementType::kFloat64: static_cast<double*>(data)[i] = value; return;
    case ElementType::kFloat16: {
      const _Float16 half = static_cast<_Float16>(static_cast<float>(value));
      std::memcpy(static_cast<uint16_t*>(data) + i, &half, 2);
      return;
    }
    case ElementType::kBFloat16: {
      const float rounded = static_cast<float>(value);
      uint32_t bits;
      std::memcpy(&bits, &rounded, 4);
      bits = std::isnan(rounded) ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1);
      static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits >> 16);
      return;
    }
  }
}

int64_t integer(const void* data, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

template <typename Error, typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  ((message << parts), ...);
  throw Error(message.str());
}

void check_values(const EmbeddingBagCall& call) {
  const BagBatch& bags = call.bags;
  const int64_t last = bags.num_features * bags.batch_size;
  if (integer(bags.offsets, bags.offsets_are_int64, 0) != 0) {
    fail<std::invalid_argument>("offsets[0]: expected 0, got ",
                                integer(bags.offsets, bags.offsets_are_int64, 0));
  }
  for (int64_t i = 0; i < last; ++i) {
    const int64_t begin = integer(bags.offsets, bags.offsets_are_int64, i);
    const int64_t end = integer(bags.offsets, bags.offsets_are_int64, i + 1);
    if (end < begin) {
      fail<std::invalid_argument>("offsets: expected non-decreasing values, but offsets[", i,
                                  "] = ", begin, " and offsets[", i + 1, "] = ", end);
    }
  }
  const int64_t total = integer(bags.offsets, bags.offsets_are_int64, last);
  if (total != bags.nnz) {
    fail<std::invalid_argument>("offsets[", last, "]: expected the number of indices, ", bags.nnz,
                                ", got ", total);
  }
  for (int64_t f = 0; f < bags.num_features; ++f) {
    const int32_t table = call.features[f].table;
    const int64_t rows = call.tables[table].num_embeddings;
    const int64_t begin = integer(bags.offsets, bags.offsets_are_int64, f * bags.batch_size);
    const int64_t end = integer(bags.offsets, bags.offsets_are_int64, (f + 1) * bags.batch_size);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = integer(bags.indices, bags.indices_are_int64, i);
      if (id < 0 || id >= rows) {
        fail<std::out_of_range>("indices[", i, "] of feature ", f, ": expected 0 to ", rows - 1,
                                " (table ", table, " has ", rows, " rows), got ", id);
      }
    }
  }
}

// The chain of one row: prefix[k] = G1[i1] ... Gk+1[ik+1], of shape [q1 * .. * qk+1, rk+1].
struct Chain {
  int64_t slice[kMaxCores];
  std::vector<double> prefix[kMaxCores];
};

void compute_chain(const EmbeddingBagCall& call, int32_t table, int64_t id, Chain& chain) {
  const TableShape& shape = call.tables[table];
  for (int k = shape.num_cores - 1; k >= 0; --k) {
    chain.slice[k] = id % shape.p[k];
    id /= shape.p[k];
  }
  int64_t rows = 1;
  std::vector<double> one = {1.0};
  for (int k = 0; k < shape.num_cores; ++k) {
    const std::vector<double>& left = k == 0 ? one : chain.prefix[k - 1];
    const int64_t columns = shape.q[k] * shape.r[k + 1];
    const void* core = call.cores[call.first_core[table] + k];
    const int64_t base = chain.slice[k] * shape.slice_numel(k);
    std::vector<double>& product = chain.prefix[k];
    product.assign(rows * columns, 0.0);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t s = 0; s < shape.r[k]; ++s) {
        for (int64_t n = 0; n < columns; ++n) {
          product[m * columns + n] +=
              left[m * shape.r[k] + s] * load(core, call.core_type, base + s * columns + n);
        }
      }
    }
    rows *= shape.q[k];
  }
}

template <typename Visit>
void for_each_lookup(const EmbeddingBagCall& call, const Visit& visit) {
  const BagBatch& bags = call.bags;
  for (int64_t f = 0; f < bags.num_features; ++f) {
    for (int64_t b = 0; b < bags.batch_size; ++b) {
      const int64_t bag = f * bags.batch_size + b;
      const int64_t begin = integer(bags.offsets, bags.offsets_are_int64, bag);
      const int64_t end = integer(bags.offsets, bags.offsets_are_int64, bag + 1);
      const double mean =
          bags.pooling_mode == PoolingMode::kMean && end > begin ? 1.0 / (end - begin) : 1.0;
      for (int64_t i = begin; i < end; ++i) {
        const double weight =
            bags.per_sample_weights
                ? load(bags.per_sample_weights,
                       call.core_type == ElementType::kFloat64 ? ElementType::kFloat64
                                                               : ElementType::kFloat32,
                       i)
                : 1.0;
        visit(f, b, i, integer(bags.indices, bags.indices_are_int64, i), weight, mean);
      }
    }
  }
}

// Core gradients in double, and which slices were looked up.
struct Gradients {
  std::vector<std::vector<double>> values;
  std::vector<std::vector<char>> touched;
};

Gradients core_gradients(const EmbeddingBagCall& call, const StridedMatrix& grad) {
  Gradients gradients;
  for (size_t table = 0; table < call.tables.size(); ++table) {
    for (int k = 0; k < call.tables[table].num_cores; ++k) {
      gradients.values.emplace_back(call.tables[table].core_numel(k), 0.0);
      gradients.touched.emplace_back(call.tables[table].p[k], 0);
    }
  }
  Chain chain;
  for_each_lookup(call, [&](int64_t f, int64_t b, int64_t, int64_t id, double weight, double mean) {
    const int32_t table = call.features[f].table;
    const TableShape& shape = call.tables[table];
    compute_chain(call, table, id, chain);
    std::vector<double> right(shape.embedding_dim);
    for (int64_t j = 0; j < shape.embedding_dim; ++j) {
      right[j] = weight * mean *
                 load(grad.data, grad.type,
                      b * grad.row_stride + (call.features[f].column + j) * grad.column_stride);
    }
    int64_t rows = shape.embedding_dim;
    for (int k = shape.num_cores - 1; k >= 0; --k) {
      rows /= shape.q[k];
      const int64_t columns = shape.q[k] * shape.r[k + 1];
      const int64_t core = call.first_core[table] + k;
      const int64_t base = chain.slice[k] * shape.slice_numel(k);
      gradients.touched[core][chain.slice[k]] = 1;
      std::vector<double> next(rows * shape.r[k], 0.0);
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t s = 0; s < shape.r[k]; ++s) {
          const double left = k == 0 ? 1.0 : chain.prefix[k - 1][m * shape.r[k] + s];
          double sum = 0;
          for (int64_t n = 0; n < columns; ++n) {
            gradients.values[core][base + s * columns + n] += left * right[m * columns + n];
            sum += right[m * columns + n] * load(call.cores[core], call.core_type,
                                                 base + s * columns + n);
          }
          next[m * shape.r[k] + s] = sum;
        }
      }
      right = std::move(next);
    }
  });
  return gradients;
}

}  // namespace

void embedding_bag_forward(const EmbeddingBagCall& call, void* output, ElementType output_type,
                           int64_t total_columns) {
  check_values(call);
  std::vector<double> sums(call.bags.batch_size * total_columns, 0.0);
  Chain chain;
  for_each_lookup(call, [&](int64_t f, int64_t b, int64_t, int64_t id, double weight, double mean) {
    const FeatureColumns& feature = call.features[f];
    compute_chain(call, feature.table, id, chain);
    const TableShape& shape = call.tables[feature.table];
    const std::vector<double>& row = chain.prefix[shape.num_cores - 1];
    for (int64_t j = 0; j < shape.embedding_dim; ++j) {
      sums[b * total_columns + feature.column + j] += weight * mean * row[j];
    }
  });
  for (size_t i = 0; i < sums.size(); ++i) {
    store(output, output_type, i, sums[i]);
  }
}

void embedding_bag_backward(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                            const std::vector<void*>& core_grads) {
  check_values(call);
  const Gradients gradients = core_gradients(call, grad_output);
  for (size_t core = 0; core < core_grads.size(); ++core) {
    for (size_t i = 0; i < gradients.values[core].size(); ++i) {
      store(core_grads[core], call.core_type, i, gradients.values[core][i]);
    }
  }
}

void embedding_bag_weights_grad(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                                void* weights_grad) {
  check_values(call);
  Chain chain;
  const ElementType type = call.core_type == ElementType::kFloat64 ? ElementType::kFloat64
                                                                   : ElementType::kFloat32;
  for_each_lookup(call, [&](int64_t f, int64_t b, int64_t i, int64_t id, double, double mean) {
    const FeatureColumns& feature = call.features[f];
    compute_chain(call, feature.table, id, chain);
    const TableShape& shape = call.tables[feature.table];
    double dot = 0;
    for (int64_t j = 0; j < shape.embedding_dim; ++j) {
      dot += chain.prefix[shape.num_cores - 1][j] *
             load(grad_output.data, grad_output.type,
                  b * grad_output.row_stride + (feature.column + j) * grad_output.column_stride);
    }
    store(weights_grad, type, i, dot * mean);
  });
}

void embedding_bag_backward_update(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                                   const OptimizerArguments& optimizer,
                                   const std::vector<void*>& momentum1,
                                   const std::vector<void*>& momentum2) {
  check_values(call);
  const Gradients gradients = core_gradients(call, grad_output);
  const ElementType state_type = call.core_type == ElementType::kFloat64 ? ElementType::kFloat64
                                                                         : ElementType::kFloat32;
  const double rate = *optimizer.learning_rate;
  const double correction1 = 1 - std::pow(optimizer.beta1, *optimizer.iteration);
  const double correction2 = 1 - std::pow(optimizer.beta2, *optimizer.iteration);
  for (size_t core = 0; core < gradients.values.size(); ++core) {
    const int64_t slices = gradients.touched[core].size();
    const int64_t numel = gradients.values[core].size() / slices;
    for (int64_t slice = 0; slice < slices; ++slice) {
      if (!gradients.touched[core][slice]) {
        continue;
      }
      const double* grad = gradients.values[core].data() + slice * numel;
      double row_scale = 0;
      if (optimizer.type == OptimizerType::kRowWiseAdagrad) {
        double mean_square = 0;
        for (int64_t j = 0; j < numel; ++j) {
          mean_square += grad[j] * grad[j] / numel;
        }
        mean_square += load(momentum1[core], state_type, slice);
        store(momentum1[core], state_type, slice, mean_square);
        row_scale = rate / (std::sqrt(mean_square) + optimizer.eps);
      }
      for (int64_t j = 0; j < numel; ++j) {
        const int64_t i = slice * numel + j;
        const double weight = load(call.cores[core], call.core_type, i);
        double step = 0;
        switch (optimizer.type) {
          case OptimizerType::kSgd: step = rate * grad[j]; break;
          case OptimizerType::kRowWiseAdagrad: step = row_scale * grad[j]; break;
          case OptimizerType::kAdagrad: {
            const double sum = load(momentum1[core], state_type, i) + grad[j] * grad[j];
            store(momentum1[core], state_type, i, sum);
            step = rate * grad[j] / (std::sqrt(sum) + optimizer.eps);
            break;
          }
          case OptimizerType::kAdam: {
            const double m = optimizer.beta1 * load(momentum1[core], state_type, i) +
                             (1 - optimizer.beta1) * grad[j];
            const double v = optimizer.beta2 * load(momentum2[core], state_type, i) +
                             (1 - optimizer.beta2) * grad[j] * grad[j];
            store(momentum1[core], state_type, i, m);
            store(momentum2[core], state_type, i, v);
            step = rate * (m / correction1 / (std::sqrt(v / correction2) + optimizer.eps) +
                           optimizer.weight_decay * weight);
            break;
          }
        }
        store(call.cores[core], call.core_type, i, weight - step);
      }
    }
  }
}

}  // namespace flowtt
