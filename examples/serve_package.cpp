// Serves an AOTInductor package with TT tables from C++, without Python, TorchRec or FBGEMM.
//
//   serve_package <libtorchrec_flowtt.so> <package.pt2> <number of keys> <id of each key>
//
// asks for two samples, the first with one id a key and the second with empty bags, and prints the
// output row by row.

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

// The library implements the operator; its schema is defined in Python otherwise, by
// torchrec_flowtt/ops/schemas.py.
TORCH_LIBRARY_FRAGMENT(flowtt, library) {
  library.def(
      "tt_embedding_bag(Tensor[] cores, Tensor indices, Tensor offsets, "
      "Tensor? per_sample_weights, int[] cores_per_table, int[] num_embeddings, "
      "int[] feature_table_map, int pooling_mode, ScalarType output_dtype, bool allow_tf32, "
      "bool deterministic) -> Tensor");
}

int main(int argc, char** argv) {
  const int keys = argc > 3 ? std::atoi(argv[3]) : 0;
  if (keys < 1 || argc != 4 + keys) {
    std::cerr << "usage: " << argv[0] << " <library> <package> <number of keys> <id of each key>\n";
    return 1;
  }
  if (dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  std::vector<int64_t> values, lengths;
  for (int key = 0; key < keys; ++key) {
    values.push_back(std::atoll(argv[4 + key]));
    lengths.insert(lengths.end(), {1, 0});
  }
  const c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader serve(argv[2]);
  const at::Tensor by_key = at::tensor(lengths).reshape({keys, 2});
  const at::Tensor output = serve.run({at::tensor(values), by_key})[0].contiguous();
  for (int64_t i = 0; i < output.numel(); ++i) {
    std::cout << output.const_data_ptr<float>()[i] << "\n";
  }
  return 0;
}
