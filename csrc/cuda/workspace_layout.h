// How a workspace is cut into pieces.

#pragma once

#include <cstdint>

namespace flowtt::cuda {

constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

// Of a workspace and of its pieces.
inline constexpr int64_t kWorkspaceAlignment = 256;

// Pieces of the workspace, one after the other.
class WorkspaceLayout {
 public:
  explicit WorkspaceLayout(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    T* piece = count == 0 ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += round_up(count * static_cast<int64_t>(sizeof(T)), kWorkspaceAlignment);
    return piece;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace flowtt::cuda
