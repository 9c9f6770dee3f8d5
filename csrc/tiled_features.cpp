#include "tiled_features.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "cuda/device_attributes.h"
#include "cuda/tiled_backward.h"
#include "cuda/tiled_backward_pairs.h"
#include "cuda/tiled_forward.h"
#include "packed_cores.h"

namespace flowtt {
namespace {

using cuda::TiledFeature;
using cuda::TiledPlan;
using cuda::Tiling;

struct TiledCandidate {
  Tiling tiling;
  bool is_kept;  // the table's packed cores are
  int64_t feature;
  int32_t table;
};

struct GradientCandidate {
  cuda::GradientClass tables;
  int64_t feature;
  int32_t table;
};

enum class ForwardChoice { kAuto, kTiled, kGeneral };

// What the environment says is read at every call, so that a process can compare.
ForwardChoice forward_choice() {
  const char* value = std::getenv("FLOWTT_CUDA_FORWARD");
  const std::string choice = value == nullptr ? "" : value;
  if (choice.empty() || choice == "auto") return ForwardChoice::kAuto;
  if (choice == "tiled") return ForwardChoice::kTiled;
  STD_TORCH_CHECK(choice == "general",
                  "FLOWTT_CUDA_FORWARD: expected auto, tiled or general, got '", choice, "'");
  return ForwardChoice::kGeneral;
}

struct Mechanism {
  std::string_view name;
  uint32_t bit;
};

constexpr Mechanism kMechanisms[] = {
    {"fusion", cuda::kFusionDisabled},     {"grouping", cuda::kGroupingDisabled},
    {"folding", cuda::kFoldingDisabled},   {"sharing", cuda::kSharingDisabled},
    {"stealing", cuda::kStealingDisabled}, {"checkpoints", cuda::kCheckpointsDisabled}};

uint32_t disabled_mechanisms() {
  const char* value = std::getenv("FLOWTT_CUDA_DISABLE");
  std::string_view list = value == nullptr ? "" : value;
  uint32_t disabled = 0;
  while (!list.empty()) {
    std::string_view name = list.substr(0, list.find(','));
    list.remove_prefix(std::min(name.size() + 1, list.size()));
    while (name.starts_with(' ')) name.remove_prefix(1);
    while (name.ends_with(' ')) name.remove_suffix(1);
    const auto mechanism =
        std::find_if(std::begin(kMechanisms), std::end(kMechanisms),
                     [&](const Mechanism& candidate) { return candidate.name == name; });
    STD_TORCH_CHECK(mechanism != std::end(kMechanisms), "FLOWTT_CUDA_DISABLE: expected any of ",
                    "fusion, grouping, folding, sharing, stealing and checkpoints, separated by ",
                    "commas, got '", std::string(name), "'");
    disabled |= mechanism->bit;
  }
  return disabled;
}

TiledFeature tiled_feature(const EmbeddingBagArguments& arguments, int64_t feature, int32_t table) {
  TiledFeature result = describe_table(arguments, table);
  result.output_column = arguments.features[feature].column;
  result.feature = static_cast<int32_t>(feature);
  return result;
}

// Of what is kept of a call's lookups: counters, their entries, then their factors if they have
// any.
constexpr int64_t kOrderCounterBytes = cuda::kOrderCounters * sizeof(uint32_t);

int64_t order_bytes(const BagBatch& bags) {
  return kOrderCounterBytes +
         bags.nnz * static_cast<int64_t>(sizeof(cuda::GroupedLookup) +
                                         (cuda::has_factors(bags) ? sizeof(float) : 0));
}

cuda::LookupOrder parse_order(const EmbeddingBagArguments& arguments, const Tensor& order) {
  cuda::LookupOrder result{};
  if (order.numel() == 0) return result;
  const int64_t bytes = order_bytes(arguments.bags);
  STD_TORCH_CHECK(order.numel() == bytes && order.scalar_type() == ScalarType::Byte &&
                      order.is_contiguous() && order.device() == arguments.cores[0].device(),
                  "order: expected the ", bytes, " bytes on the cores' device that ",
                  "flowtt::tt_embedding_bag_with_order returns for these lookups, or none, got ",
                  order.numel(), " elements");
  char* const data = static_cast<char*>(order.mutable_data_ptr());
  result.counters = reinterpret_cast<uint32_t*>(data);
  result.entries = reinterpret_cast<cuda::GroupedLookup*>(data + kOrderCounterBytes);
  if (cuda::has_factors(arguments.bags)) {
    result.factors = reinterpret_cast<float*>(result.entries + arguments.bags.nnz);
  }
  return result;
}

}  // namespace

std::vector<int64_t> look_up_tiled_features(const CudaCall& call, const cuda::PooledOutput& output,
                                            bool allow_tf32, bool deterministic, Tensor* order,
                                            const Tensor* packed) {
  const EmbeddingBagArguments& arguments = call.arguments();
  const bool three_products = needs_three_products(arguments.core_type, output.type, allow_tf32);
  const std::optional<KeptCores> kept =
      packed != nullptr ? std::optional(parse_kept_cores(arguments, *packed, three_products))
                        : std::nullopt;
  const ForwardChoice choice = forward_choice();
  const uint32_t disabled = disabled_mechanisms();
  const int64_t num_features = arguments.bags.num_features;
  // From the sizes alone: the host does not know which feature has how many lookups.
  const auto pays = [&](const TableShape& shape) {
    if (choice != ForwardChoice::kAuto) return choice == ForwardChoice::kTiled;
    return cuda::tiling_pays(arguments.bags.nnz / num_features, num_features, shape);
  };
  std::vector<int64_t> remaining;
  std::vector<TiledCandidate> candidates;
  for (size_t feature = 0; feature < arguments.features.size(); ++feature) {
    const int32_t table = arguments.features[feature].table;
    Tiling tiling{};
    if (arguments.output_rows > 0 && pays(arguments.tables[table]) &&
        cuda::find_tiling(arguments.core_type, arguments.output_rows, arguments.tables[table],
                          &tiling)) {
      const bool is_kept = kept && kept->tables[table].is_packed;
      candidates.push_back({tiling, is_kept, static_cast<int64_t>(feature), table});
    } else {
      remaining.push_back(static_cast<int64_t>(feature));
    }
  }
  // Neighbours share launches, and features of one table its packed cores.
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const TiledCandidate& left, const TiledCandidate& right) {
                     return std::tie(left.tiling, left.is_kept, left.table) <
                            std::tie(right.tiling, right.is_kept, right.table);
                   });
  for (size_t first = 0; first < candidates.size();) {
    TiledPlan plan{};
    plan.tiling = candidates[first].tiling;
    plan.core_type = arguments.core_type;
    plan.three_products = three_products;
    plan.deterministic = deterministic;
    plan.disabled = disabled;
    if (candidates[first].is_kept) plan.kept = kept->memory;
    size_t end = first;
    while (end < candidates.size() && candidates[end].tiling == plan.tiling &&
           candidates[end].is_kept == candidates[first].is_kept &&
           plan.group.count < cuda::kTiledFeaturesPerLaunch) {
      TiledFeature& feature = plan.group.features[plan.group.count++];
      feature = tiled_feature(arguments, candidates[end].feature, candidates[end].table);
      if (candidates[first].is_kept) kept->find_cores(&feature);
      ++end;
    }
    plan.wants_order = order != nullptr && end - first == arguments.features.size();
    call.check(cuda::plan_tiled_forward(arguments.bags, output, &plan));
    cuda::LookupOrder kept{};
    if (plan.saves_order) {
      *order = call.empty(order_bytes(arguments.bags), ScalarType::Byte);
      kept = parse_order(arguments, *order);
    }
    Tensor workspace = call.empty(static_cast<int64_t>(plan.workspace_bytes), ScalarType::Byte);
    call.check(cuda::launch_tiled_forward(plan, arguments.bags, output, kept,
                                          workspace.mutable_data_ptr(), call.stream()));
    first = end;
  }
  return remaining;
}

std::vector<int64_t> differentiate_tiled_features(const CudaCall& call,
                                                  const StridedMatrix& grad_output,
                                                  const FindGradient& find_gradient,
                                                  const cuda::BackwardStart& start, bool allow_tf32,
                                                  const Tensor* order) {
  const EmbeddingBagArguments& arguments = call.arguments();
  const ForwardChoice choice = forward_choice();
  int shared_limit = 0;
  call.check(cuda::read_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_limit));
  std::vector<int64_t> remaining;
  std::vector<GradientCandidate> candidates;
  for (size_t feature = 0; feature < arguments.features.size(); ++feature) {
    const int32_t table = arguments.features[feature].table;
    if (choice != ForwardChoice::kGeneral && arguments.output_rows > 0 && arguments.bags.nnz > 0 &&
        cuda::has_tiled_backward(arguments.core_type, arguments.output_rows,
                                 arguments.tables[table], shared_limit)) {
      candidates.push_back(
          {cuda::gradient_class(arguments.tables[table]), static_cast<int64_t>(feature), table});
    } else {
      remaining.push_back(static_cast<int64_t>(feature));
    }
  }
  // Within a class as in the forward pass, whose order of lookups may be used again.
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const GradientCandidate& left, const GradientCandidate& right) {
                     return std::tuple(left.tables, left.table) <
                            std::tuple(right.tables, right.table);
                   });
  for (size_t first = 0; first < candidates.size();) {
    cuda::BackwardPlan plan{};
    plan.core_type = arguments.core_type;
    plan.three_products = !allow_tf32;
    plan.tables = candidates[first].tables;
    if (first == 0) plan.start = start;
    size_t end = first;
    int64_t pair_elements = 0;
    while (end < candidates.size() && candidates[end].tables == plan.tables &&
           plan.group.count < cuda::kTiledFeaturesPerLaunch) {
      if (plan.tables.cores == 4 &&
          (end == first || candidates[end].table != candidates[end - 1].table)) {
        pair_elements += cuda::pair_elements(arguments.tables[candidates[end].table]);
        if (end > first && pair_elements > cuda::kMaxPairElements) break;
      }
      const int32_t f = plan.group.count++;
      plan.group.features[f] =
          tiled_feature(arguments, candidates[end].feature, candidates[end].table);
      for (int k = 0; k < plan.group.features[f].num_cores; ++k) {
        std::tie(plan.targets[f].gradients[k], plan.targets[f].touched[k]) =
            find_gradient(candidates[end].table, k);
      }
      cuda::set_three_gradient_cores(&plan.group.features[f], &plan.targets[f]);
      ++end;
    }
    if (order != nullptr && end - first == arguments.features.size()) {
      plan.order = parse_order(arguments, *order);
    }
    std::optional<cuda::BackwardPlan> of_four_cores;
    Tensor pairs;
    if (plan.tables.cores == 4) {
      of_four_cores = plan;
      pairs = call.empty(cuda::pair_bytes(plan), ScalarType::Byte);
      call.check(
          cuda::launch_pairs(*of_four_cores, pairs.mutable_data_ptr(), call.stream(), &plan));
    }
    call.check(cuda::plan_tiled_backward(arguments.bags, grad_output, &plan));
    Tensor workspace = call.empty(static_cast<int64_t>(plan.workspace_bytes), ScalarType::Byte);
    call.check(cuda::launch_tiled_backward(plan, arguments.bags, grad_output,
                                           workspace.mutable_data_ptr(), call.stream()));
    if (of_four_cores) {
      call.check(
          cuda::launch_pair_gradients(*of_four_cores, pairs.mutable_data_ptr(), call.stream()));
    }
    first = end;
  }
  return remaining;
}

}  // namespace flowtt
