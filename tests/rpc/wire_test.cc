// The hand-written reader: by-hand byte strings, then generated code as the judge.
#include "server/rpc/wire/reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "server/rpc/wire/writer.h"
#include "tests/fuzz/compare_topk_request.h"
#include "tests/rpc/judged.h"

namespace logitd::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace std::string_literals;

std::vector<Piece> Whole(std::string_view bytes) {
  return {Piece(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size())};
}

absl::Status Parse(std::string_view bytes, TopKFields* fields, size_t max_list = 1000) {
  return ParseTopKFields(Whole(bytes), max_list, fields);
}

TEST(WireTest, ReadsEveryField) {
  TopKFields fields;
  const std::string bytes =
      "\x08\x02"                   // dtype = 2
      "\x10\xac\x02"               // rows = 300
      "\x18\x05"                   // vocab = 5
      "\x7a\x03xyz"                // logits = "xyz"
      "\x82\x01\x02\x07\x09"       // k = [7, 9], packed
      "\x8d\x01\x00\x00\x80\x3f"s  // temperature += 1.0, not packed
      ;
  ASSERT_TRUE(Parse(bytes, &fields).ok());
  EXPECT_EQ(fields.dtype, 2);
  EXPECT_EQ(fields.rows, 300);
  EXPECT_EQ(fields.vocab, 5);
  EXPECT_EQ(fields.input.number, 15u);
  EXPECT_EQ(fields.input.range.bytes, 3u);
  EXPECT_THAT(std::get<Int32List>(fields.params[0]), ElementsAre(7, 9));  // k
  EXPECT_THAT(std::get<FloatList>(fields.params[1]), ElementsAre(1.0f));  // temperature
}

struct Case {
  const char* name;
  std::string bytes;
  bool valid;
  const char* error = "";
};

std::string Nested(int depth) {
  return std::string(static_cast<size_t>(depth), '\x4b') +  // field 9, start group
         std::string(static_cast<size_t>(depth), '\x4c');
}

const Case kCases[] = {
    {"empty_message", "", true},
    {"last_scalar_wins", "\x10\x01\x10\x02"s, true},
    {"last_payload_wins", "\x7a\x01x\x7a\x02yz"s, true},
    {"hidden_after_logits_wins", "\x7a\x01x\x72\x02yz"s, true},
    {"logits_after_hidden_win", "\x72\x02yz\x7a\x01x"s, true},
    {"empty_hidden_wins_too", "\x7a\x01x\x72\x00"s, true},
    {"shared", "\x6a\x07\x0a\x01L\x10\x08\x18\x0c"s, true},
    {"shared_in_two_parts_is_merged", "\x6a\x03\x0a\x01L\x6a\x02\x10\x08"s, true},
    {"shared_parts_before_logits_are_gone", "\x6a\x03\x0a\x01L\x7a\x01x\x6a\x02\x10\x08"s, true},
    {"logits_after_shared_win", "\x6a\x03\x0a\x01L\x7a\x01x"s, true},
    {"empty_shared_wins_too", "\x7a\x01x\x6a\x00"s, true},
    {"last_lease_wins", "\x6a\x06\x0a\x01L\x0a\x01M"s, true},
    {"shared_with_unknown_fields", "\x6a\x06\x20\x01\x2b\x08\x01\x2c"s, true},
    {"shared_as_varint_is_unknown", "\x7a\x01x\x68\x05"s, true},
    {"shared_cut", "\x6a\x07\x0a\x01L"s, false, "shared at byte 0"},
    {"shared_with_a_lease_beyond_its_end", "\x6a\x02\x0a\x02\x10\x01"s, false, "shared at byte 0"},
    {"shared_with_a_varint_beyond_its_end", "\x6a\x02\x10\x80\x01\x10\x01"s, false,
     "shared at byte 0"},
    {"broken_shared_before_logits", "\x6a\x01\x0a\x7a\x01x"s, false, "shared at byte 0"},
    {"head_and_its_size", "\x22\x02\xc3\xa4\x28\x80\x01"s, true},
    {"last_head_wins", "\x22\x02xy\x22\x01z"s, true},
    {"head_not_utf8", "\x22\x02\xc3\x28"s, false, "head at byte 0"},
    {"head_a_surrogate", "\x22\x03\xed\xa0\x80"s, false, "head at byte 0"},
    {"head_cut", "\x22\x03xy"s, false, "head at byte 0"},
    {"head_as_varint_is_unknown", "\x20\x05"s, true},
    {"empty_payload_wins_too", "\x7a\x01x\x7a\x00"s, true},
    {"unknown_varint", "\x48\x96\x01\x10\x01"s, true},
    {"unknown_fixed64", "\x49\x01\x02\x03\x04\x05\x06\x07\x08"s, true},
    {"unknown_fixed64_cut", "\x49\x01\x02\x03\x04\x05\x06\x07"s, false, "unknown field at byte 0"},
    {"unknown_bytes", "\x4a\x02hi\x10\x01"s, true},
    {"unknown_fixed32", "\x4d\x01\x02\x03\x04"s, true},
    {"unknown_group", "\x4b\x08\x01\x4c\x10\x01"s, true},
    {"group_with_our_numbers_inside_is_skipped", "\x4b\x10\x05\x4c\x10\x01"s, true},
    {"group_never_ends", "\x4b\x08\x01"s, false, "unknown field at byte 0"},
    {"group_ends_as_another", "\x4b\x54"s, false},
    {"group_end_without_start", "\x4c"s, false},
    {"groups_100_deep", Nested(100), true},
    {"groups_101_deep", Nested(101), false},
    {"wire_type_6", "\x4e"s, false},
    {"wire_type_7", "\x4f"s, false},
    {"field_number_0", "\x02\x01x"s, false},
    {"tag_0", "\x00"s, false, "tag at byte 0"},
    {"tag_of_6_bytes", "\x90\x80\x80\x80\x80\x00\x01"s, false},
    {"tag_of_5_bytes_not_canonical", "\x90\x80\x80\x80\x00\x01"s, true},
    {"wrong_wire_type_is_unknown", "\x0a\x01x\x15\x01\x02\x03\x04"s, true},
    {"payload_as_varint_is_unknown", "\x78\x05"s, true},
    {"varint_of_10_bytes", "\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"s, true},
    {"varint_of_11_bytes", "\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"s, false,
     "rows at byte 0"},
    {"varint_cut", "\x08\x01\x10\xff"s, false, "rows at byte 2"},
    {"payload_cut", "\x7a\x05xyz"s, false, "logits at byte 0"},
    {"length_of_2_gib", "\x7a\xff\xff\xff\xff\x07"s, false, "logits at byte 0"},
    {"length_beyond_32_bits", "\x7a\x80\x80\x80\x80\x10"s, false, "logits at byte 0"},
    {"length_not_canonical", "\x7a\x81\x80\x80\x80\x00x"s, true},
    {"k_not_packed", "\x80\x01\x03\x80\x01\x04"s, true},
    {"k_in_three_runs", "\x82\x01\x01\x03\x80\x01\x04\x82\x01\x00"s, true},
    {"k_negative", "\x82\x01\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"s, true},
    {"k_packed_varint_crosses_its_end", "\x82\x01\x01\x80\x01"s, false, "k at byte 0"},
    {"k_packed_cut", "\x82\x01\x05\x01"s, false, "k at byte 0"},
    {"temperature_packed", "\x8a\x01\x04\x00\x00\x80\x3f"s, true},
    {"temperature_packed_of_3_bytes", "\x8a\x01\x03\x00\x00\x80"s, false, "temperature at byte 0"},
    {"temperature_cut", "\x8d\x01\x00\x00"s, false, "temperature at byte 0"},
    {"temperature_as_fixed64_is_unknown", "\x89\x01\x01\x02\x03\x04\x05\x06\x07\x08"s, true}};

TEST(WireTest, EveryCaseMatchesTheVerdictWrittenDownAndGeneratedCode) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    TopKFields fields;
    const absl::Status status = Parse(c.bytes, &fields);
    EXPECT_EQ(status.ok(), c.valid) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.error));
    EXPECT_EQ(testing::TopKRequestDisagreement(c.bytes), "");
  }
}

TEST(WireTest, ListsAreBounded) {
  TopKFields two_of_two, three_of_two, two_of_one;
  EXPECT_TRUE(Parse("\x82\x01\x02\x01\x01"s, &two_of_two, 2).ok());
  const absl::Status status = Parse("\x82\x01\x03\x01\x01\x01"s, &three_of_two, 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("k: got more than 2 values, allowed one for each row, at most 2"));
  EXPECT_FALSE(Parse("\x8a\x01\x08\x00\x00\x80\x3f\x00\x00\x80\x3f"s, &two_of_one, 1).ok());
}

// Writes messages as no encoder would but every decoder must take them.
class RandomMessage {
 public:
  explicit RandomMessage(uint32_t seed) : random_(seed) {}

  std::string Next() {
    bytes_.clear();
    for (uint32_t fields = Below(12); fields > 0; --fields) AddField();
    return bytes_;
  }

  uint32_t Below(uint32_t end) { return static_cast<uint32_t>(random_() % end); }

 private:
  void Varint(uint64_t value) {
    uint8_t buffer[kMaxVarintSize];
    WireWriter writer(buffer);
    writer.Varint(value);
    size_t size = static_cast<size_t>(writer.at() - buffer);
    if (size < 4 && Below(8) == 0) {  // not canonical
      buffer[size - 1] |= 0x80;
      buffer[size++] = 0;
    }
    bytes_.append(reinterpret_cast<const char*>(buffer), size);
  }

  uint64_t Value() {
    switch (Below(4)) {
      case 0:
        return Below(4);
      case 1:
        return Below(1000);
      case 2:
        return ~uint64_t{Below(1000)};
      default:
        return random_();
    }
  }

  void Noise(uint32_t bytes) {
    for (; bytes > 0; --bytes) bytes_.push_back(static_cast<char>(random_()));
  }

  void Body(uint32_t wire_type) {
    switch (wire_type) {
      case 0:
        Varint(Value());
        break;
      case 1:
        Noise(8);
        break;
      case 2: {
        const uint32_t length = Below(40);
        Varint(length);
        Noise(length);
        break;
      }
      case 5:
        Noise(4);
        break;
    }
  }

  void Group(uint32_t number, int depth) {
    Varint(number << 3 | 3);
    for (uint32_t inner = Below(3); inner > 0; --inner) {
      if (depth > 0 && Below(2) == 0) {
        Group(Below(30) + 1, depth - 1);
      } else {
        constexpr uint32_t kTypes[] = {0, 1, 2, 5};
        const uint32_t type = kTypes[Below(4)];
        Varint((Below(30) + 1) << 3 | type);
        Body(type);
      }
    }
    Varint(number << 3 | 4);
  }

  void AddField() {
    constexpr uint32_t kNumbers[] = {1, 2, 3, 15, 16, 17};
    constexpr uint32_t kNatural[] = {0, 0, 0, 2, 2, 2};
    const uint32_t pick = Below(9);
    if (pick >= 8) {
      Group(Below(100) + 1, 3);
      return;
    }
    if (pick >= 6) {  // unknown, or known with whatever type
      constexpr uint32_t kTypes[] = {0, 1, 2, 5};
      const uint32_t number = pick == 6 ? Below(1 << 20) + 1 : kNumbers[Below(6)];
      const bool list = number == 16 || number == 17;  // noise is no valid packed list
      const uint32_t type = list ? 1 : kTypes[Below(4)];
      Varint(number << 3 | type);
      Body(type);
      return;
    }
    if (pick == 4) {
      if (Below(2) == 0) {
        Varint(16 << 3);
        Varint(Value());
        return;
      }
      std::string outer;
      outer.swap(bytes_);
      for (uint32_t n = Below(6); n > 0; --n) Varint(Value());
      outer.swap(bytes_);
      Varint(16 << 3 | 2);
      Varint(outer.size());
      bytes_ += outer;
      return;
    }
    if (pick == 5) {
      const bool packed = Below(2) == 0;
      Varint(17 << 3 | (packed ? 2 : 5));
      const uint32_t values = packed ? Below(5) : 1;
      if (packed) Varint(values * 4);
      Noise(values * 4);
      return;
    }
    Varint(kNumbers[pick] << 3 | kNatural[pick]);
    Body(kNatural[pick]);
  }

  std::mt19937_64 random_;
  std::string bytes_;
};

std::string Hex(std::string_view bytes) {
  std::string hex;
  for (const char c : bytes)
    absl::StrAppend(&hex, absl::Hex(static_cast<uint8_t>(c), absl::kZeroPad2));
  return hex;
}

TEST(WireTest, RandomMessagesReadAsGeneratedCodeReadsThem) {
  constexpr uint32_t kSeed = 20240607;
  RandomMessage random(kSeed);
  for (int i = 0; i < 20000; ++i) {
    const std::string bytes = random.Next();
    v1::TopKRequest judge;
    ASSERT_TRUE(judge.ParseFromString(bytes))
        << "the generator writes valid messages only: " << Hex(bytes);
    ASSERT_EQ(testing::TopKRequestDisagreement(bytes), "")
        << "seed " << kSeed << " message " << i << ": " << Hex(bytes);
  }
}

TEST(WireTest, DamagedMessagesAreJudgedAsGeneratedCodeJudgesThem) {
  constexpr uint32_t kSeed = 7;
  RandomMessage random(kSeed);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = random.Next();
    if (bytes.empty()) continue;
    for (uint32_t n = random.Below(3) + 1; n > 0; --n) {
      bytes[random.Below(static_cast<uint32_t>(bytes.size()))] =
          static_cast<char>(random.Below(256));
    }
    ASSERT_EQ(testing::TopKRequestDisagreement(bytes), "")
        << "seed " << kSeed << " message " << i << ": " << Hex(bytes);
    TopKFields fields;
    refused += !Parse(bytes, &fields).ok();
  }
  EXPECT_GT(refused, 2000);
}

TEST(WireTest, TruncatedAtEveryByteJudgedAsGeneratedCodeJudges) {
  v1::TopKRequest request;
  request.set_dtype(v1::DTYPE_F16);
  request.set_rows(3);
  request.set_vocab(1000);
  request.set_logits(std::string(200, 'l'));
  for (int k : {1, 200, 30000}) request.add_k(k);
  for (float t : {0.5f, 1.0f, 2.0f}) request.add_temperature(t);
  const std::string bytes = request.SerializeAsString();
  int refused = 0;
  for (size_t size = 0; size <= bytes.size(); ++size) {
    const std::string_view cut = std::string_view(bytes).substr(0, size);
    ASSERT_EQ(testing::TopKRequestDisagreement(cut), "") << size;
    TopKFields fields;
    refused += !Parse(cut, &fields).ok();
  }
  EXPECT_GT(refused, 200);
}

TEST(WireTest, CorpusOfTheFuzzer) {
  testing::ExpectCorpusAgrees("topk_request_fuzz", &testing::TopKRequestDisagreement);
}

}  // namespace
}  // namespace logitd::rpc
