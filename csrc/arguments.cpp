#include "arguments.h"

#include <array>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace flowtt {
namespace {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  ((message << parts), ...);
  throw std::invalid_argument(message.str());
}

template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) {
    fail(parts...);
  }
}

const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    default:
      return "an unsupported dtype";
  }
}

// Parts of messages, written only when there is an error: a call has many tensors to check.
struct ShapeOf {
  const Tensor& tensor;
};
std::ostream& operator<<(std::ostream& stream, const ShapeOf& shape) {
  const auto sizes = shape.tensor.sizes();
  stream << '[';
  for (size_t i = 0; i < sizes.size(); ++i) {
    stream << (i ? ", " : "") << sizes[i];
  }
  return stream << ']';
}
struct TablePrefix {
  size_t table;
};
std::ostream& operator<<(std::ostream& stream, const TablePrefix& prefix) {
  return stream << "table " << prefix.table << ": ";
}

bool is_defined(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

ElementType element_type(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return ElementType::kFloat32;
    case ScalarType::Half:
      return ElementType::kFloat16;
    case ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case ScalarType::Double:
      return ElementType::kFloat64;
    default:
      break;
  }
  fail(name, ": expected dtype float32, float16, bfloat16 or float64, got ",
       dtype_name(tensor.scalar_type()));
}

void check_same_device(const Tensor& tensor, const Tensor& core, const char* name) {
  check(tensor.is_cuda() == core.is_cuda() && tensor.get_device_index() == core.get_device_index(),
        name, ": expected the device of the cores, got another device");
}

// value * factor, or an error: the products index rows and columns in int64.
template <typename... Parts>
int64_t checked_product(int64_t value, int64_t factor, const Parts&... what) {
  check(factor == 0 || value <= std::numeric_limits<int64_t>::max() / factor, what...,
        " does not fit int64");
  return value * factor;
}

TableShape parse_table(const std::vector<Tensor>& cores, int64_t first, int64_t num_cores,
                       int64_t num_embeddings, size_t table) {
  const TablePrefix prefix{table};
  check(num_cores >= kMinCores && num_cores <= kMaxCores, prefix,
        "cores_per_table: expected 2 to 4 cores, got ", num_cores);
  TableShape shape{};
  shape.num_cores = static_cast<int32_t>(num_cores);
  shape.num_embeddings = num_embeddings;
  shape.embedding_dim = 1;
  int64_t rows = 1;
  for (int k = 0; k < num_cores; ++k) {
    const Tensor& core = cores[first + k];
    check(core.dim() == 4, prefix, "core ", k,
          ": expected shape [p, left rank, q, right rank], got ", ShapeOf{core});
    shape.p[k] = core.size(0);
    shape.q[k] = core.size(2);
    const int64_t left = core.size(1);
    const int64_t right = core.size(3);
    check(shape.p[k] > 0 && shape.q[k] > 0 && left > 0 && right > 0, prefix, "core ", k,
          ": every size must be positive, got ", ShapeOf{core});
    check(left == (k == 0 ? 1 : shape.r[k]), prefix, "core ", k, ": expected left rank ",
          k == 0 ? 1 : shape.r[k], ", got shape ", ShapeOf{core});
    check(k + 1 < num_cores || right == 1, prefix, "core ", k,
          ": expected right rank 1 in the last core, got shape ", ShapeOf{core});
    shape.r[k] = left;
    shape.r[k + 1] = right;
    rows = checked_product(rows, shape.p[k], prefix, "the product of p_shapes");
    shape.embedding_dim =
        checked_product(shape.embedding_dim, shape.q[k], prefix, "the product of q_shapes");
  }
  check(num_embeddings >= 0 && num_embeddings <= rows, prefix, "num_embeddings: expected 0 to ",
        rows, ", the product of p_shapes, got ", num_embeddings);
  return shape;
}

// Without pooling the rows of all features lie one below the other.
void use_one_row_per_lookup(EmbeddingBagArguments& parsed) {
  const int64_t dim = parsed.tables[parsed.features[0].table].embedding_dim;
  for (size_t feature = 0; feature < parsed.features.size(); ++feature) {
    FeatureColumns& columns = parsed.features[feature];
    const int64_t other_dim = parsed.tables[columns.table].embedding_dim;
    check(other_dim == dim,
          "pooling_mode 2 (none): expected tables of one embedding_dim, but feature 0 (table ",
          parsed.features[0].table, ") has ", dim, " and feature ", feature, " (table ",
          columns.table, ") has ", other_dim);
    columns.column = 0;
  }
  parsed.total_columns = dim;
  parsed.output_rows = parsed.bags.nnz;
}

void check_index_tensor(const Tensor& tensor, const char* name) {
  check(tensor.dim() == 1, name, ": expected one dimension, got shape ", ShapeOf{tensor});
  check(tensor.scalar_type() == ScalarType::Long || tensor.scalar_type() == ScalarType::Int, name,
        ": expected dtype int64 or int32, got ", dtype_name(tensor.scalar_type()));
}

Tensor made_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

OptimizerType optimizer_type(const std::string& name) {
  if (name == "exact_sgd") return OptimizerType::kSgd;
  if (name == "exact_adagrad") return OptimizerType::kAdagrad;
  if (name == "exact_row_wise_adagrad") return OptimizerType::kRowWiseAdagrad;
  if (name == "adam") return OptimizerType::kAdam;
  fail("optimizer: expected exact_sgd, exact_adagrad, exact_row_wise_adagrad or adam, got '", name,
       "'");
}

std::vector<void*> parse_states(const EmbeddingBagArguments& arguments,
                                const std::vector<Tensor>& states, const char* name, bool needed,
                                bool row_wise) {
  const size_t expected = needed ? arguments.cores.size() : 0;
  check(states.size() == expected, name, ": expected ", expected, " tensors, got ", states.size());
  std::vector<void*> data(arguments.cores.size(), nullptr);
  for (size_t i = 0; i < states.size(); ++i) {
    const Tensor& state = states[i];
    const Tensor& core = arguments.cores[i];
    const ScalarType dtype = accumulation_dtype(arguments.core_type);
    check(state.scalar_type() == dtype, name, "[", i, "]: expected dtype ", dtype_name(dtype),
          ", got ", dtype_name(state.scalar_type()));
    check_same_device(state, core, name);
    bool same_shape = state.dim() == (row_wise ? 1 : 4) && state.is_contiguous();
    for (int64_t axis = 0; same_shape && axis < state.dim(); ++axis) {
      same_shape = state.size(axis) == core.size(axis);
    }
    check(same_shape, name, "[", i, "]: expected a contiguous tensor of ",
          row_wise ? "one value per slice of the core " : "the shape of the core ", ShapeOf{core},
          ", got shape ", ShapeOf{state});
    data[i] = state.mutable_data_ptr();
  }
  return data;
}

}  // namespace

ScalarType accumulation_dtype(ElementType core_type) {
  return core_type == ElementType::kFloat64 ? ScalarType::Double : ScalarType::Float;
}

EmbeddingBagArguments parse_tables(const std::vector<Tensor>& cores,
                                   const std::vector<int64_t>& cores_per_table,
                                   const std::vector<int64_t>& num_embeddings) {
  EmbeddingBagArguments parsed{};
  check(!cores.empty(), "cores: expected at least one table's cores, got an empty list");
  check(num_embeddings.size() == cores_per_table.size(), "num_embeddings: expected ",
        cores_per_table.size(), " values, one per table, got ", num_embeddings.size());

  const Tensor& first = cores[0];
  parsed.core_type = element_type(first, "cores");
  for (size_t i = 0; i < cores.size(); ++i) {
    check(cores[i].scalar_type() == first.scalar_type(),
          "cores: expected one dtype, but core 0 is ", dtype_name(first.scalar_type()),
          " and core ", i, " is ", dtype_name(cores[i].scalar_type()));
    check_same_device(cores[i], first, "cores");
    parsed.cores.push_back(made_contiguous(cores[i]));
    parsed.core_data.push_back(parsed.cores.back().data_ptr());
  }

  int64_t core = 0;
  for (size_t table = 0; table < cores_per_table.size(); ++table) {
    const int64_t count = cores_per_table[table];
    check(count >= 0 && core + count <= static_cast<int64_t>(cores.size()),
          "cores_per_table: the tables need more cores than the ", cores.size(), " given");
    parsed.tables.push_back(parse_table(cores, core, count, num_embeddings[table], table));
    parsed.first_core.push_back(core);
    core += count;
  }
  check(core == static_cast<int64_t>(cores.size()), "cores: the tables have ", core,
        " cores together, got ", cores.size());
  return parsed;
}

EmbeddingBagArguments parse_embedding_bag_arguments(const std::vector<Tensor>& cores,
                                                    const Tensor& indices, const Tensor& offsets,
                                                    const std::optional<Tensor>& per_sample_weights,
                                                    const std::vector<int64_t>& cores_per_table,
                                                    const std::vector<int64_t>& num_embeddings,
                                                    const std::vector<int64_t>& feature_table_map,
                                                    int64_t pooling_mode) {
  EmbeddingBagArguments parsed = parse_tables(cores, cores_per_table, num_embeddings);
  const Tensor& first = cores[0];
  check(!feature_table_map.empty(), "feature_table_map: expected at least one feature");
  for (size_t feature = 0; feature < feature_table_map.size(); ++feature) {
    const int64_t table = feature_table_map[feature];
    check(table >= 0 && table < static_cast<int64_t>(parsed.tables.size()), "feature_table_map[",
          feature, "]: expected a table in 0 to ", parsed.tables.size() - 1, ", got ", table);
    parsed.features.push_back({static_cast<int32_t>(table), parsed.total_columns});
    parsed.total_columns += parsed.tables[table].embedding_dim;
  }

  check_index_tensor(indices, "indices");
  check_index_tensor(offsets, "offsets");
  check_same_device(indices, first, "indices");
  check_same_device(offsets, first, "offsets");
  const int64_t num_features = static_cast<int64_t>(feature_table_map.size());
  check(offsets.numel() >= 1 && (offsets.numel() - 1) % num_features == 0,
        "offsets: expected F * B + 1 values for F = ", num_features, " features, got ",
        offsets.numel());
  // Known without reading the device, where no kernel would run that could find it.
  check(offsets.numel() > 1 || indices.numel() == 0, "offsets: expected bags for the ",
        indices.numel(), " indices, got one value, which stands for no bags");
  check(pooling_mode >= 0 && pooling_mode <= 2,
        "pooling_mode: expected 0 (sum), 1 (mean) or 2 (none), got ", pooling_mode);

  parsed.indices = made_contiguous(indices);
  parsed.offsets = made_contiguous(offsets);
  BagBatch& bags = parsed.bags;
  bags.indices = parsed.indices.data_ptr();
  bags.offsets = parsed.offsets.data_ptr();
  bags.indices_are_int64 = indices.scalar_type() == ScalarType::Long;
  bags.offsets_are_int64 = offsets.scalar_type() == ScalarType::Long;
  bags.nnz = indices.numel();
  bags.num_features = num_features;
  bags.batch_size = (offsets.numel() - 1) / num_features;
  bags.pooling_mode = static_cast<PoolingMode>(pooling_mode);
  parsed.output_rows = bags.batch_size;
  if (bags.pooling_mode == PoolingMode::kNone) {
    check(!is_defined(per_sample_weights),
          "per_sample_weights: expected None with pooling_mode 2 (none), got a tensor");
    use_one_row_per_lookup(parsed);
  }

  if (is_defined(per_sample_weights)) {
    const Tensor& weights = *per_sample_weights;
    const ScalarType dtype = accumulation_dtype(parsed.core_type);
    check(weights.scalar_type() == dtype, "per_sample_weights: expected dtype ", dtype_name(dtype),
          " for ", dtype_name(first.scalar_type()), " cores, got ",
          dtype_name(weights.scalar_type()));
    check(weights.dim() == 1 && weights.numel() == bags.nnz, "per_sample_weights: expected shape [",
          bags.nnz, "] as indices, got ", ShapeOf{weights});
    check_same_device(weights, first, "per_sample_weights");
    parsed.per_sample_weights = made_contiguous(weights);
    bags.per_sample_weights = parsed.per_sample_weights->data_ptr();
  }
  return parsed;
}

ElementType parse_output_type(const EmbeddingBagArguments& arguments, ScalarType output_dtype) {
  const bool double_cores = arguments.core_type == ElementType::kFloat64;
  switch (output_dtype) {
    case ScalarType::Float:
      if (!double_cores) return ElementType::kFloat32;
      break;
    case ScalarType::Half:
      if (!double_cores) return ElementType::kFloat16;
      break;
    case ScalarType::BFloat16:
      if (!double_cores) return ElementType::kBFloat16;
      break;
    case ScalarType::Double:
      if (double_cores) return ElementType::kFloat64;
      break;
    default:
      break;
  }
  fail("output_dtype: expected ",
       double_cores ? "float64 for float64 cores" : "float32, float16 or bfloat16", ", got ",
       dtype_name(output_dtype));
}

char* parse_packed_cores(const EmbeddingBagArguments& arguments, const Tensor& packed,
                         int64_t bytes, bool three_products) {
  check_same_device(packed, arguments.cores[0], "packed");
  check(packed.scalar_type() == ScalarType::Byte, "packed: expected dtype uint8, got ",
        dtype_name(packed.scalar_type()));
  check(packed.dim() == 1 && packed.is_contiguous(),
        "packed: expected one contiguous dimension, got shape ", ShapeOf{packed});
  check(packed.numel() == bytes, "packed: expected the ", bytes,
        " bytes of these tables' cores for ",
        three_products ? "three products (fp32 accuracy)" : "one product (TF32 or 16 bits)",
        ", got ", packed.numel(),
        "; flowtt::pack_tt_cores and the lookup need the same tables, dtypes and allow_tf32");
  char* const data = static_cast<char*>(packed.mutable_data_ptr());
  constexpr uintptr_t kVectorBytes = 16;
  check(reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0,
        "packed: expected memory that is aligned to ", kVectorBytes, " bytes");
  return data;
}

StridedMatrix parse_grad_output(const EmbeddingBagArguments& arguments, const Tensor& grad_output) {
  check(grad_output.dim() == 2 && grad_output.size(0) == arguments.output_rows &&
            grad_output.size(1) == arguments.total_columns,
        "grad_output: expected shape [", arguments.output_rows, ", ", arguments.total_columns,
        "], got ", ShapeOf{grad_output});
  check_same_device(grad_output, arguments.cores[0], "grad_output");
  const ElementType type = element_type(grad_output, "grad_output");
  check((type == ElementType::kFloat64) == (arguments.core_type == ElementType::kFloat64),
        "grad_output: dtype ", dtype_name(grad_output.scalar_type()), " does not go with ",
        dtype_name(arguments.cores[0].scalar_type()), " cores");
  return {grad_output.data_ptr(), type, grad_output.stride(0), grad_output.stride(1)};
}

OptimizerStates parse_optimizer_arguments(
    const EmbeddingBagArguments& arguments, const std::vector<Tensor>& original_cores,
    const std::vector<Tensor>& momentum1, const std::vector<Tensor>& momentum2,
    const Tensor& learning_rate, const Tensor& iteration, const std::string& optimizer, double eps,
    double beta1, double beta2, double weight_decay, bool stochastic_rounding) {
  for (size_t i = 0; i < original_cores.size(); ++i) {
    check(original_cores[i].is_contiguous(), "core ", i,
          ": the fused update writes in place and needs a contiguous core, got shape ",
          ShapeOf{original_cores[i]});
  }
  check(learning_rate.numel() == 1 && learning_rate.scalar_type() == ScalarType::Float,
        "learning_rate: expected one float32 value, got shape ", ShapeOf{learning_rate}, ", dtype ",
        dtype_name(learning_rate.scalar_type()));
  check(iteration.numel() == 1 && iteration.scalar_type() == ScalarType::Long,
        "iter: expected one int64 value, got shape ", ShapeOf{iteration}, ", dtype ",
        dtype_name(iteration.scalar_type()));
  check_same_device(learning_rate, arguments.cores[0], "learning_rate");
  check_same_device(iteration, arguments.cores[0], "iter");

  OptimizerStates parsed{};
  const OptimizerType type = optimizer_type(optimizer);
  parsed.optimizer = {type,
                      static_cast<const float*>(learning_rate.data_ptr()),
                      static_cast<int64_t*>(iteration.mutable_data_ptr()),
                      eps,
                      beta1,
                      beta2,
                      weight_decay,
                      stochastic_rounding};
  parsed.momentum1 = parse_states(arguments, momentum1, "momentum1", type != OptimizerType::kSgd,
                                  type == OptimizerType::kRowWiseAdagrad);
  parsed.momentum2 =
      parse_states(arguments, momentum2, "momentum2", type == OptimizerType::kAdam, false);
  return parsed;
}

}  // namespace flowtt
