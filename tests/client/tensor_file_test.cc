#include "client/tensor_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/client/test_files.h"

namespace logitd::client {
namespace {

using ::logitd::testing::BytesOf;
using ::logitd::testing::LittleEndian;
using ::logitd::testing::Npy;
using ::logitd::testing::Safetensors;
using ::logitd::testing::TempDir;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kSixFloats = BytesOf<float>({1, 2, 3, 4, 5, 6});

struct GoodCase {
  const char* name;
  const char* file;
  std::string content;
  v1::DType dtype;
  std::vector<int64_t> shape;
  std::string bytes;
  const char* tensor = "";  // after the file's name
};

std::string NpyHeader(const std::string& descr, const std::string& order,
                      const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape +
         ", }   \n";
}

const GoodCase kGood[] = {
    {"npy_1",
     "a.npy",
     Npy(NpyHeader("<f4", "False", "(2, 3)"), kSixFloats),
     v1::DTYPE_F32,
     {2, 3},
     kSixFloats},
    {"npy_2",
     "a.npy",
     Npy(NpyHeader("<f4", "False", "(3, 2)"), kSixFloats, 2),
     v1::DTYPE_F32,
     {3, 2},
     kSixFloats},
    {"npy_3",
     "a.npy",
     Npy(NpyHeader("<f4", "False", "(3, 2)"), kSixFloats, 3),
     v1::DTYPE_F32,
     {3, 2},
     kSixFloats},
    {"npy_half",
     "a.npy",
     Npy(NpyHeader("<f2", "False", "(1, 3)"), "abcdef"),
     v1::DTYPE_F16,
     {1, 3},
     "abcdef"},
    {"npy_vector_is_one_row",
     "a.npy",
     Npy(NpyHeader("<f4", "False", "(6,)"), kSixFloats),
     v1::DTYPE_F32,
     {1, 6},
     kSixFloats},
    {"npy_keys_in_any_order",
     "a.npy",
     Npy("{\"shape\":(2,3),'descr':'<f4','fortran_order':False}", kSixFloats),
     v1::DTYPE_F32,
     {2, 3},
     kSixFloats},
    {"safetensors_f32",
     "a.safetensors",
     Safetensors(R"({"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", kSixFloats),
     v1::DTYPE_F32,
     {2, 3},
     kSixFloats},
    {"safetensors_bf16_padded_header",
     "a.safetensors",
     Safetensors(R"({"x":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}   )", "abcdef"),
     v1::DTYPE_BF16,
     {1, 3},
     "abcdef"},
    {"safetensors_metadata_is_no_tensor",
     "a.safetensors",
     Safetensors(
         R"({"__metadata__":{"format":"pt"},"x":{"dtype":"F16","shape":[1,1],"data_offsets":[0,2]}})",
         "ab"),
     v1::DTYPE_F16,
     {1, 1},
     "ab"},
    {"safetensors_by_name",
     "a.safetensors",
     Safetensors(
         R"({"x":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"y":{"dtype":"F16","shape":[2],"data_offsets":[2,6]}})",
         "abcdef"),
     v1::DTYPE_F16,
     {1, 2},
     "cdef",
     ":y"},
    {"safetensors_name_with_colon",
     "a.safetensors",
     Safetensors(R"({"x:1":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}})", "ab"),
     v1::DTYPE_F16,
     {1, 1},
     "ab",
     ":x:1"},
    {"safetensors_beside_an_unread_dtype",
     "a.safetensors",
     Safetensors(
         R"({"n":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"x":{"dtype":"F16","shape":[1],"data_offsets":[8,10]}})",
         "01234567ab"),
     v1::DTYPE_F16,
     {1, 1},
     "ab",
     ":x"},
};

TEST(TensorFileTest, ReadsWhatIsAllowed) {
  TempDir dir;
  for (const GoodCase& test : kGood) {
    SCOPED_TRACE(test.name);
    const std::string path = dir.Write(test.file, test.content) + test.tensor;
    absl::StatusOr<FileTensor> tensor = LoadMatrix(path);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->dtype, test.dtype);
    EXPECT_EQ(tensor->shape, test.shape);
    EXPECT_EQ(tensor->bytes, test.bytes);
  }
}

struct BadCase {
  const char* name;
  const char* file;
  std::string content;
  const char* error;  // a part of the text
  const char* tensor = "";
};

std::string BadNpy(const std::string& header) { return Npy(header, kSixFloats); }
std::string OneTensor(const std::string& value) {
  return Safetensors("{\"x\":" + value + "}", kSixFloats);
}

const BadCase kBad[] = {
    {"unknown_extension", "a.bin", "x", "allowed: FILE.npy, FILE.safetensors"},
    {"npy_empty", "a.npy", "", "empty file"},
    {"npy_lfs_pointer", "a.npy",
     "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n",
     "got a Git LFS pointer"},
    {"npy_other_magic", "a.npy", std::string(64, 'x'), "not an npy file"},
    {"npy_only_magic", "a.npy", "\x93NUMPY", "not an npy file"},
    {"npy_version_9", "a.npy", Npy("{}", "", 9), "npy version 9; allowed: 1, 2, 3"},
    {"npy_2_cut_in_length", "a.npy", std::string("\x93NUMPY\x02\x00\x01\x00", 10),
     "ends inside the npy header length"},
    {"npy_header_past_end", "a.npy", std::string("\x93NUMPY\x01\x00\xff\xff{", 11),
     "npy header of 65535 bytes in a file of 11"},
    {"npy_2_header_of_4_gib", "a.npy", std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{}", 14),
     "npy header of 4294967295 bytes"},
    {"npy_header_not_dict", "a.npy", BadNpy("[1, 2]"), "header is not a dict"},
    {"npy_header_unclosed", "a.npy", BadNpy("{'descr': '<f4', "), "a header key is not a string"},
    {"npy_string_unclosed", "a.npy", BadNpy("{'descr': '<f4"),
     "'descr' has a value that is not understood"},
    {"npy_key_missing", "a.npy", BadNpy("{'descr': '<f4', 'shape': (6,)}"), "header lacks one of"},
    {"npy_key_twice", "a.npy", BadNpy("{'descr': '<f4', 'descr': '<f4'}"),
     "header key 'descr' twice"},
    {"npy_key_unknown", "a.npy", BadNpy("{'colour': 'red'}"), "unknown header key 'colour'"},
    {"npy_no_colon", "a.npy", BadNpy("{'descr' '<f4'}"), "no ':' after header key 'descr'"},
    {"npy_text_after_dict", "a.npy", BadNpy(NpyHeader("<f4", "False", "(6,)") + "x"),
     "text after the header's dict"},
    {"npy_structured_dtype", "a.npy",
     BadNpy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (6,)}"),
     "'descr' has a value that is not understood"},
    {"npy_big_endian", "a.npy", BadNpy(NpyHeader(">f4", "False", "(6,)")),
     "dtype '>f4'; allowed: <f4, <f2"},
    {"npy_double", "a.npy", BadNpy(NpyHeader("<f8", "False", "(3,)")), "dtype '<f8'; allowed"},
    {"npy_double_converts", "a.npy", BadNpy(NpyHeader("<f8", "False", "(3,)")),
     "; numpy.save(FILE, x.astype(\"<f4\")) converts it"},
    {"npy_integers", "a.npy", BadNpy(NpyHeader("<i4", "False", "(6,)")), "dtype '<i4'; allowed"},
    {"npy_fortran", "a.npy", BadNpy(NpyHeader("<f4", "True", "(2, 3)")),
     "Fortran order; allowed: C order"},
    {"npy_fortran_order_1", "a.npy", BadNpy(NpyHeader("<f4", "1", "(2, 3)")),
     "'fortran_order' has a value"},
    {"npy_negative_dim", "a.npy", BadNpy(NpyHeader("<f4", "False", "(-2, -3)")),
     "'shape' has a value"},
    {"npy_dim_past_int64", "a.npy", BadNpy(NpyHeader("<f4", "False", "(99999999999999999999,)")),
     "'shape' has a value"},
    {"npy_shape_overflows", "a.npy", BadNpy(NpyHeader("<f4", "False", "(4611686018427387904, 4)")),
     "disagrees with the 24 data bytes"},
    {"npy_cut", "a.npy", Npy(NpyHeader("<f4", "False", "(2, 4)"), kSixFloats),
     "shape [2,4] of <f4 disagrees with the 24 data bytes"},
    {"npy_too_long", "a.npy", Npy(NpyHeader("<f4", "False", "(2, 2)"), kSixFloats),
     "shape [2,2] of <f4 disagrees with the 24 data bytes"},
    {"npy_three_dims", "a.npy", BadNpy(NpyHeader("<f4", "False", "(1, 2, 3)")),
     "shape [1,2,3]; allowed: [rows,vocab] or [vocab]"},
    {"npy_scalar", "a.npy", Npy(NpyHeader("<f4", "False", "()"), "abcd"), "shape []; allowed"},
    {"npy_no_rows", "a.npy", Npy(NpyHeader("<f4", "False", "(0, 6)"), ""), "shape [0,6]; allowed"},
    {"safetensors_short", "a.safetensors", "1234567", "shorter than the 8 bytes"},
    {"safetensors_lfs_pointer", "a.safetensors",
     "version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "got a Git LFS pointer"},
    {"safetensors_header_past_end", "a.safetensors", LittleEndian(100, 8) + "{}",
     "header length: got 100, allowed 0..2, as the file has 10 bytes"},
    {"safetensors_header_of_all_ones", "a.safetensors", LittleEndian(~uint64_t{0}, 8) + "{}",
     "header length: got 18446744073709551615"},
    {"safetensors_not_json", "a.safetensors", Safetensors("{x}", ""),
     "header is not a JSON object"},
    {"safetensors_array", "a.safetensors", Safetensors("[]", ""), "header is not a JSON object"},
    {"safetensors_deep_nesting", "a.safetensors", Safetensors(std::string(200000, '['), ""),
     "header is not a JSON object"},
    {"safetensors_deep_value", "a.safetensors",
     OneTensor(std::string(200000, '[') + std::string(200000, ']')),
     "tensor 'x': not a JSON object"},
    {"safetensors_no_tensor", "a.safetensors", Safetensors("{}", ""), "no tensor in the file"},
    {"safetensors_entry_not_object", "a.safetensors", OneTensor("7"),
     "tensor 'x': not a JSON object"},
    {"safetensors_no_dtype", "a.safetensors", OneTensor(R"({"shape":[6],"data_offsets":[0,24]})"),
     "tensor 'x': no dtype"},
    {"safetensors_no_shape", "a.safetensors", OneTensor(R"({"dtype":"F32","data_offsets":[0,24]})"),
     "tensor 'x': no shape"},
    {"safetensors_no_offsets", "a.safetensors", OneTensor(R"({"dtype":"F32","shape":[6]})"),
     "tensor 'x': no data_offsets"},
    {"safetensors_one_offset", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[6],"data_offsets":[0]})"), "tensor 'x': no data_offsets"},
    {"safetensors_offsets_past_end", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[7],"data_offsets":[0,28]})"),
     "data_offsets: got [0,28], allowed inside the file's 24 data bytes"},
    {"safetensors_offsets_backwards", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[1],"data_offsets":[8,4]})"),
     "data_offsets: got [8,4], allowed inside"},
    {"safetensors_offset_negative", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[6],"data_offsets":[-4,20]})"),
     "data_offsets: got [-4,20], allowed inside"},
    {"safetensors_offset_fraction", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[6],"data_offsets":[0,24.0]})"),
     "data_offsets: got [0,24.0], allowed inside"},
    {"safetensors_offset_past_int64", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[6],"data_offsets":[0,18446744073709551615]})"),
     "inside the file's 24 data bytes"},
    {"safetensors_dim_negative", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[-6],"data_offsets":[0,24]})"),
     "a dimension of shape is not a size"},
    {"safetensors_shape_disagrees", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[5],"data_offsets":[0,24]})"),
     "shape: got [5] of F32, allowed one with its 24 data bytes"},
    {"safetensors_shape_overflows", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]})"),
     "allowed one with its 0 data bytes"},
    {"safetensors_dtype_not_read", "a.safetensors",
     OneTensor(R"({"dtype":"F64","shape":[3],"data_offsets":[0,24]})"),
     "tensor 'x' has dtype F64; allowed: F32, F16, BF16; x.to(torch.float32) or "
     "x.astype(numpy.float32) converts it"},
    {"safetensors_dtype_unknown", "a.safetensors",
     OneTensor(R"({"dtype":"Q3","shape":[3],"data_offsets":[0,24]})"),
     "tensor 'x' has dtype Q3; allowed"},
    {"safetensors_name_needed", "a.safetensors",
     Safetensors(
         R"({"x":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"y":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}})",
         "abcd"),
     "There are: x, y"},
    {"safetensors_name_unknown", "a.safetensors",
     OneTensor(R"({"dtype":"F32","shape":[6],"data_offsets":[0,24]})"),
     "no tensor 'z'; there are: x", ":z"},
};

TEST(TensorFileTest, NamesTheFault) {
  TempDir dir;
  for (const BadCase& test : kBad) {
    SCOPED_TRACE(test.name);
    const std::string path = dir.Write(test.file, test.content) + test.tensor;
    absl::StatusOr<FileTensor> tensor = LoadMatrix(path);
    ASSERT_FALSE(tensor.ok());
    EXPECT_THAT(std::string(tensor.status().message()), HasSubstr(test.error));
  }
}

// Whatever prefix of a good file is there, reading stays inside the map (ASan and the kernel
// watch).
TEST(TensorFileTest, EveryPrefixOfAGoodFileIsRefused) {
  TempDir dir;
  for (const GoodCase& test : kGood) {
    for (size_t size = 0; size < test.content.size(); ++size) {
      const std::string path = dir.Write(test.file, test.content.substr(0, size)) + test.tensor;
      EXPECT_FALSE(LoadMatrix(path).ok()) << test.name << " cut to " << size;
    }
  }
}

TEST(TensorFileTest, SaysWhatIsWrongWithThePath) {
  TempDir dir;
  EXPECT_EQ(LoadMatrix(dir.path("none.npy")).status().code(), absl::StatusCode::kNotFound);
  std::filesystem::create_directory(dir.path("folder.npy"));
  EXPECT_THAT(std::string(LoadMatrix(dir.path("folder.npy")).status().message()),
              HasSubstr("not a regular file"));
}

TEST(TensorFileTest, ATensorOfUpToFourDimensionsAndOfBooleans) {
  TempDir dir;
  const std::string four =
      dir.Write("four.npy", Npy(NpyHeader("<f4", "False", "(1, 2, 3, 1)"), kSixFloats));
  ASSERT_TRUE(LoadTensor(four).ok());
  EXPECT_THAT(LoadTensor(four)->shape, ElementsAre(1, 2, 3, 1));
  const std::string npy =
      dir.Write("b.npy", Npy(NpyHeader("|b1", "False", "(3,)"), std::string("\0\1\2", 3)));
  const std::string safetensors = dir.Write(
      "b.safetensors", Safetensors(R"({"x":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})",
                                   std::string("\0\1\2", 3)));
  for (const std::string& file : {npy, safetensors}) {
    const absl::StatusOr<FileTensor> tensor = LoadTensor(file, /*allow_bool=*/true);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_TRUE(tensor->boolean);
    EXPECT_EQ(tensor->bytes, std::string("\0\1\2", 3));
    EXPECT_FALSE(LoadTensor(file).ok());
    EXPECT_FALSE(LoadMatrix(file).ok());
  }
  const auto refusal = [&](const std::string& shape) {
    return std::string(
        LoadTensor(dir.Write("r.npy", Npy(NpyHeader("<f4", "False", shape), kSixFloats)))
            .status()
            .message());
  };
  EXPECT_THAT(refusal("(1, 1, 1, 2, 3)"), HasSubstr("allowed: 1 to 4 dimensions, none empty"));
  EXPECT_THAT(refusal("(6, 0)"), HasSubstr("disagrees"));
}

TEST(TensorFileTest, ASavedTensorIsReadBack) {
  TempDir dir;
  for (const char* name : {"a.npy", "a.safetensors"}) {
    for (v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) {
      const std::string path = dir.path(name);
      const std::string bytes = kSixFloats.substr(0, static_cast<size_t>(6 * DTypeSize(dtype)));
      const absl::Status saved = SaveTensor(path, dtype, {1, 3, 2}, bytes);
      EXPECT_EQ(saved, CheckSavable(path, dtype));
      if (path.back() == 'y' && dtype == v1::DTYPE_BF16) {
        EXPECT_THAT(std::string(saved.message()), HasSubstr("npy files have no bfloat16"));
        continue;
      }
      ASSERT_TRUE(saved.ok()) << saved;
      const absl::StatusOr<FileTensor> tensor = LoadTensor(path);
      ASSERT_TRUE(tensor.ok()) << tensor.status();
      EXPECT_EQ(tensor->dtype, dtype);
      EXPECT_THAT(tensor->shape, ElementsAre(1, 3, 2));
      EXPECT_EQ(tensor->bytes, bytes);
    }
  }
  // As numpy writes it: the data starts on a border of 64.
  ASSERT_TRUE(SaveTensor(dir.path("b.npy"), v1::DTYPE_F32, {6}, kSixFloats).ok());
  std::ifstream in(dir.path("b.npy"), std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(in), {}};
  EXPECT_EQ(file, absl::StrCat(absl::string_view("\x93NUMPY\x01\0\x76\0", 10),
                               "{'descr': '<f4', 'fortran_order': False, 'shape': (6,), }",
                               std::string(60, ' '), "\n", kSixFloats));
  EXPECT_THAT(std::string(SaveTensor(dir.path("c.txt"), v1::DTYPE_F32, {6}, kSixFloats).message()),
              HasSubstr("allowed: FILE.npy, FILE.safetensors"));
  EXPECT_THAT(
      std::string(SaveTensor(dir.path("none/c.npy"), v1::DTYPE_F32, {6}, kSixFloats).message()),
      HasSubstr("none/c.npy: No such file"));
}

TEST(TensorFileTest, TheMappingLivesAsLongAsATensor) {
  TempDir dir;
  FileTensor tensor;
  {
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(dir.Write(
        "a.safetensors",
        Safetensors(
            R"({"b":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"a":{"dtype":"F16","shape":[],"data_offsets":[2,4]}})",
            "abcd")));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_THAT(file->names(), ElementsAre("a", "b"));
    tensor = *file->Find("b");
  }
  EXPECT_EQ(tensor.bytes, "ab");
}

}  // namespace
}  // namespace logitd::client
