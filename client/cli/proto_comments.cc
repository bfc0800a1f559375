#include "client/cli/proto_comments.h"

#include <google/protobuf/descriptor.pb.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

// The descriptors that protoc writes with --include_source_info: generated code has no comments.
asm(".pushsection .rodata\n"
    "logitd_descriptors:\n"
    ".incbin \"" LOGITD_DESCRIPTORS
    "\"\n"
    "logitd_descriptors_end:\n"
    ".byte 0\n"
    ".popsection\n");
extern "C" {
extern const char logitd_descriptors[] __attribute__((visibility("hidden")));
extern const char logitd_descriptors_end[] __attribute__((visibility("hidden")));
}

namespace logitd::cli {
namespace {

const google::protobuf::DescriptorPool& Pool() {
  static const auto* const pool = [] {
    auto* built = new google::protobuf::DescriptorPool;
    google::protobuf::FileDescriptorSet files;
    files.ParseFromArray(logitd_descriptors,
                         static_cast<int>(logitd_descriptors_end - logitd_descriptors));
    for (const auto& file : files.file()) built->BuildFile(file);  // imports come first
    return built;
  }();
  return *pool;
}

}  // namespace

std::string FirstSentence(const google::protobuf::FieldDescriptor& field) {
  const google::protobuf::FieldDescriptor* commented = Pool().FindFieldByName(field.full_name());
  google::protobuf::SourceLocation location;
  if (commented == nullptr || !commented->GetSourceLocation(&location)) return "";
  std::string text =
      location.leading_comments.empty() ? location.trailing_comments : location.leading_comments;
  text = absl::StrReplaceAll(absl::StripAsciiWhitespace(text), {{"\n ", " "}, {"\n", " "}});
  for (size_t i = 0; i + 2 < text.size(); ++i) {
    // Not after "e.g.".
    if (text[i] == '.' && text[i + 1] == ' ' && absl::ascii_isupper(text[i + 2])) text.resize(i);
  }
  return std::string(absl::StripSuffix(text, "."));
}

}  // namespace logitd::cli
