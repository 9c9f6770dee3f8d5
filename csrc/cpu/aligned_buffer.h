// Uninitialised, cache-line aligned memory that only grows.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace flowtt {

template <typename T>
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(int64_t size) { ensure(size); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  AlignedBuffer(AlignedBuffer&& other) noexcept : data_(other.data_), capacity_(other.capacity_) {
    other.data_ = nullptr;
    other.capacity_ = 0;
  }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  ~AlignedBuffer() { std::free(data_); }

  // Makes room for `size` elements. The contents are lost when the memory grows.
  void ensure(int64_t size) {
    if (size <= capacity_) {
      return;
    }
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;
    const std::size_t bytes = (static_cast<std::size_t>(size) * sizeof(T) + 63) / 64 * 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (data_ == nullptr) {
      throw std::bad_alloc();
    }
    capacity_ = size;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace flowtt
