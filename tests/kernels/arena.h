// The memory of one call of an op. A test adds each array once, with the field of the arguments
// that points to it; the arena places it, uploads, runs the op and downloads.
#ifndef LOGITD_TESTS_KERNELS_ARENA_H_
#define LOGITD_TESTS_KERNELS_ARENA_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/status_macros.h"

namespace logitd::testing {

// Arrays start at multiples of 256 bytes. A guard follows each output: Run fails where the op wrote
// into one. Arrays and fields must outlive Run, which then forgets them. Not thread-safe.
class Arena {
 public:
  // Fails with the backend's own status. `backend` outlives the arena.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(Backend* backend) {
    auto stream = backend->CreateStream();
    if (!stream.ok()) return stream.status();
    return std::unique_ptr<Arena>(new Arena(backend, *std::move(stream)));
  }
  ~Arena() {
    if (slab_.bytes > 0) backend_->FreeSlab(slab_);
  }
  const DeviceInfo& device() const { return backend_->device(); }

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Adds an input: the op finds a copy of `values` at `*field`, which stays as it is where there
  // are none.
  template <typename T>
  void In(const std::vector<T>& values, const T** field) {
    In(absl::MakeConstSpan(values), field);
  }
  template <typename T>
  void In(absl::Span<const T> values, const T** field) {
    if (values.empty()) return;
    inputs_.push_back({.bytes = values.size() * sizeof(T),
                       .from = reinterpret_cast<const std::byte*>(values.data()),
                       .fields = {field}});
  }

  // Adds an output in the same way: the op finds what `*values` holds, and `*values` gets what the
  // op leaves there.
  template <typename T>
  void Out(std::vector<T>* values, T** field) {
    if (values->empty()) return;
    auto* bytes = reinterpret_cast<std::byte*>(values->data());
    outputs_.push_back(
        {.bytes = values->size() * sizeof(T), .from = bytes, .to = bytes, .fields = {field}});
  }

  // The same for a tensor, whose first element is `offset` bytes after the array's start.
  void In(absl::Span<const std::byte> bytes, size_t offset, const void** data) {
    inputs_.push_back(
        {.bytes = bytes.size(), .from = bytes.data(), .offset = offset, .fields = {data}});
  }
  // An op in place reads the output's memory too, through `input`.
  void Out(absl::Span<std::byte> bytes, size_t offset, void** data, const void** input = nullptr) {
    outputs_.push_back({.bytes = bytes.size(),
                        .from = bytes.data(),
                        .to = bytes.data(),
                        .offset = offset,
                        .fields = {data, input}});
  }

  // Runs the op of `args`, whose fields were added. Returns the device's times.
  template <typename Args>
  absl::StatusOr<StreamTimes> Run(const Args& args) {
    std::vector<Array> arrays = std::exchange(inputs_, {});
    const size_t inputs = arrays.size();
    for (Array& output : std::exchange(outputs_, {})) arrays.push_back(output);
    size_t total = 0, first_output = 0;
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (i == inputs) first_output = total;
      arrays[i].at = total;
      total += Rounded(arrays[i].bytes + kGuardBytes);
    }
    LOGITD_RETURN_IF_ERROR(Reserve(total));
    std::memset(slab_.host, kGuard, total);
    for (const Array& array : arrays) Place(array);
    LOGITD_RETURN_IF_ERROR(stream_->Upload(slab_, 0, total));
    LOGITD_RETURN_IF_ERROR(stream_->Run(args));
    LOGITD_RETURN_IF_ERROR(stream_->Download(slab_, first_output, total - first_output));
    auto times = stream_->Wait();
    if (!times.ok()) return times;
    for (size_t i = inputs; i < arrays.size(); ++i) LOGITD_RETURN_IF_ERROR(Fetch(arrays[i]));
    return times;
  }

 private:
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kGuardBytes = 64;  // at least, after each array
  static constexpr int kGuard = 0xff;        // NaN as a float of any type

  struct Array {
    size_t bytes = 0;
    const std::byte* from = nullptr;
    std::byte* to = nullptr;  // null: an input
    size_t offset = 0;        // of the field's address
    void* fields[2] = {};     // pointers to pointers of any type; null: none
    size_t at = 0;            // in the slab
  };

  Arena(Backend* backend, std::unique_ptr<Stream> stream)
      : backend_(backend), stream_(std::move(stream)) {}

  static size_t Rounded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  absl::Status Reserve(size_t bytes) {
    if (bytes <= slab_.bytes) return absl::OkStatus();
    if (slab_.bytes > 0) backend_->FreeSlab(std::exchange(slab_, Slab{}));
    auto slab = backend_->AllocateSlab(bytes);
    if (!slab.ok()) return slab.status();
    slab_ = *slab;
    return absl::OkStatus();
  }

  void Place(const Array& array) {
    if (array.bytes > 0) std::memcpy(slab_.host + array.at, array.from, array.bytes);
    const std::byte* address = slab_.device + array.at + array.offset;
    for (void* field : array.fields) {
      if (field != nullptr) std::memcpy(field, &address, sizeof(address));
    }
  }

  absl::Status Fetch(const Array& array) {
    const std::byte* end = slab_.host + array.at + array.bytes;
    const auto is_guard = [](std::byte b) { return b == std::byte{kGuard}; };
    if (!std::all_of(end, end + kGuardBytes, is_guard)) {
      return absl::InternalError(
          absl::StrFormat("the op wrote after the end of an output of %d bytes", array.bytes));
    }
    if (array.bytes > 0) std::memcpy(array.to, slab_.host + array.at, array.bytes);
    return absl::OkStatus();
  }

  Backend* backend_;
  std::unique_ptr<Stream> stream_;
  Slab slab_;
  std::vector<Array> inputs_, outputs_;
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_ARENA_H_
