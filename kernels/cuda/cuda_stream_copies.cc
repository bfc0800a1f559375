// What a stream copies: small copies by one launch, others by copy engines.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/pin_pieces.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

// A copy engine takes some microseconds to begin. A kernel that writes pinned memory takes less, up
// to about this size: 4 us and 9, events included.
constexpr size_t kKernelCopyBytes = size_t{16} << 10;
// What one launch reads of the host at most, all its copies together.
constexpr size_t kKernelGatherBytes = size_t{1} << 20;

// Whether a kernel copies so many bytes between the sides of a slab.
bool KernelCopies(const std::byte* to, const std::byte* from, size_t bytes,
                  size_t most = kKernelCopyBytes) {
  const auto odd = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
  return bytes > 0 && bytes <= most && odd % 2 == 0;
}

// What is read of the host.
size_t HostBytes(absl::Span<const RowsCopy> copies) {
  size_t bytes = 0;
  for (const RowsCopy& copy : copies) {
    if (!copy.from_device) bytes += copy.row_bytes * static_cast<size_t>(copy.rows);
  }
  return bytes;
}

// Whether a kernel can do all of the copies: none of the host's has odd places or lengths.
bool AreEven(absl::Span<const RowsCopy> copies) {
  return std::all_of(copies.begin(), copies.end(), [](const RowsCopy& copy) {
    const auto odd = reinterpret_cast<uintptr_t>(copy.from) | reinterpret_cast<uintptr_t>(copy.to) |
                     copy.from_stride | copy.to_stride | copy.row_bytes;
    return copy.from_device || odd % 2 == 0;
  });
}

// Whether the copies write to places of their own, so that one launch may do both.
bool AreApart(const RowsCopy& a, const RowsCopy& b) {
  const auto end = [](const RowsCopy& copy) {
    return copy.to + static_cast<size_t>(copy.rows - 1) * copy.to_stride + copy.row_bytes;
  };
  return end(a) <= b.to || end(b) <= a.to;
}

}  // namespace

absl::Status CudaStream::Upload(const Slab& slab, size_t offset, size_t bytes) {
  std::byte* const to = slab.device + offset;
  const std::byte* const from = slab.host + offset;
  if (small_.op != nullptr) LOGITD_RETURN_IF_ERROR(Enter(kComputing));  // it comes first
  const RowsCopy row = OneRow(to, from, bytes);
  if (phase_ <= kUploading && KernelUploads(to, from, bytes)) {
    if (!IsApart(row)) LOGITD_RETURN_IF_ERROR(EnterUpload(row));
    uploads_.push_back(row);  // for one launch with a Gather
    uploads_host_bytes_ += bytes;
    return absl::OkStatus();
  }
  LOGITD_RETURN_IF_ERROR(EnterUpload(row));
  return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "upload");
}

absl::Status CudaStream::Download(const Slab& slab, size_t offset, size_t bytes) {
  std::byte* const to = slab.host + offset;
  const std::byte* const from = slab.device + offset;
  const bool by_kernel = KernelCopies(to, from, bytes);
  if (by_kernel && small_.op != nullptr && small_.download.rows == 0) {
    small_.download = OneRow(to, from, bytes);
    return absl::OkStatus();
  }
  LOGITD_RETURN_IF_ERROR(Enter(kDownloading));
  if (by_kernel) {
    const RowsCopy row = OneRow(to, from, bytes);
    return ToStatus(GatherRows({&row, 1}, stream_, MarkDownload()), "download");
  }
  LOGITD_RETURN_IF_ERROR(MarkCopy());
  return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "download");
}

absl::Status CudaStream::Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) {
  LOGITD_RETURN_IF_ERROR(EnterUpload(OneRow(to, slab.host + offset, bytes)));
  return ToStatus(cudaMemcpyAsync(to, slab.host + offset, bytes, cudaMemcpyHostToDevice, stream_),
                  "fill");
}

absl::Status CudaStream::Gather(absl::Span<const RowsCopy> copies) {
  const auto on_device = [](const RowsCopy& copy) { return copy.from_device; };
  // With more bytes of the host a copy engine is sooner.
  const size_t host_bytes = HostBytes(copies);
  const bool by_kernel = phase_ == kIdle && marks_ != nullptr && AreEven(copies) &&
                         uploads_host_bytes_ + host_bytes <= kKernelGatherBytes;
  // What an upload wrote there comes first.
  const bool apart = std::all_of(copies.begin(), copies.end(),
                                 [this](const RowsCopy& copy) { return IsApart(copy); });
  if (by_kernel) {
    if (apart && small_.op == nullptr && uploads_.size() + copies.size() <= kMostSmallCopies) {
      uploads_.insert(uploads_.end(), copies.begin(), copies.end());
      uploads_host_bytes_ += host_bytes;
      gathers_ = true;
      return absl::OkStatus();
    }
    BeginByMarks();
  }
  LOGITD_RETURN_IF_ERROR(Enter(kUploading));
  if (!apart) LOGITD_RETURN_IF_ERROR(FlushUploads());
  for (const RowsCopy& copy : copies) {
    if (copy.from_device || by_kernel) {
      uploads_.push_back(copy);
      continue;
    }
    if (phase_ == kUploading) upload_marked_ = false;
    LOGITD_RETURN_IF_ERROR(ToStatus(CopyFromHost(copy), "gather from the host"));
  }
  if (!by_kernel && !std::any_of(copies.begin(), copies.end(), on_device)) return FlushUploads();
  return GatherUploads();
}

absl::Status CudaStream::Deliver(std::byte* to, const std::byte* from, size_t bytes) {
  LOGITD_RETURN_IF_ERROR(Enter(kDownloading));
  LOGITD_RETURN_IF_ERROR(MarkCopy());
  while (bytes > 0) {
    const size_t now = std::min(bytes, LeftOfPiece(to));
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(to, from, now, cudaMemcpyDefault, stream_), "deliver"));
    to += now;
    from += now;
    bytes -= now;
  }
  return absl::OkStatus();
}

bool CudaStream::KernelUploads(const std::byte* to, const std::byte* from, size_t bytes) const {
  const size_t most_of_one = marks_ == nullptr ? kKernelCopyBytes : kKernelGatherBytes;
  return KernelCopies(to, from, bytes, most_of_one) &&
         uploads_host_bytes_ + bytes <= kKernelGatherBytes;
}

bool CudaStream::IsApart(const RowsCopy& copy) const {
  return std::all_of(uploads_.begin(), uploads_.end(),
                     [&copy](const RowsCopy& kept) { return AreApart(copy, kept); });
}

absl::Status CudaStream::EnterUpload(const RowsCopy& copy) {
  LOGITD_RETURN_IF_ERROR(Enter(kUploading));
  if (!IsApart(copy)) LOGITD_RETURN_IF_ERROR(FlushUploads());
  if (phase_ == kUploading) upload_marked_ = false;
  return absl::OkStatus();
}

cudaError_t CudaStream::CopyFromHost(const RowsCopy& copy) {
  size_t row_bytes = copy.row_bytes;
  auto rows = static_cast<size_t>(copy.rows);
  if (copy.from_stride == row_bytes && copy.to_stride == row_bytes) {
    row_bytes *= rows;  // one long row
    rows = 1;
  }
  cudaError_t error = cudaSuccess;
  for (size_t r = 0; r < rows && error == cudaSuccess;) {
    std::byte* to = copy.to + r * copy.to_stride;
    const std::byte* from = copy.from + r * copy.from_stride;
    const size_t left = LeftOfPiece(from);
    if (rows > 1 && row_bytes <= left) {  // as many rows as the piece has whole
      const size_t whole = std::min(rows - r, (left - row_bytes) / copy.from_stride + 1);
      error = cudaMemcpy2DAsync(to, copy.to_stride, from, copy.from_stride, row_bytes, whole,
                                cudaMemcpyHostToDevice, stream_);
      r += whole;
      continue;
    }
    for (size_t done = 0; done < row_bytes && error == cudaSuccess;) {
      const size_t now = std::min(row_bytes - done, LeftOfPiece(from + done));
      error = cudaMemcpyAsync(to + done, from + done, now, cudaMemcpyHostToDevice, stream_);
      done += now;
    }
    ++r;
  }
  return error;
}

void CudaStream::DropUploads() {
  uploads_.clear();
  uploads_host_bytes_ = 0;
  gathers_ = false;
}

absl::Status CudaStream::FlushUploads() {
  if (uploads_.empty()) return absl::OkStatus();
  if (by_marks_) return GatherUploads();
  cudaError_t error = cudaSuccess;
  for (const RowsCopy& upload : uploads_) {
    const cudaError_t next =
        cudaMemcpyAsync(upload.to, upload.from, upload.row_bytes, cudaMemcpyHostToDevice, stream_);
    if (error == cudaSuccess) error = next;
  }
  DropUploads();
  return ToStatus(error, "upload");
}

absl::Status CudaStream::GatherUploads() {
  Marks marks;
  if (by_marks_ && phase_ <= kUploading) {
    marks = {.host = marks_,
             .device = device_marks_,
             .upload_begins = !upload_begun_,
             .upload_ends = true};
    upload_begun_ = upload_marked_ = true;
  }
  const cudaError_t error = GatherRows(uploads_, stream_, marks);
  DropUploads();
  return ToStatus(error, "gather");
}

}  // namespace logitd::cuda
